//! Processes of other users, which no export allows: they receive nothing, and delay no other process.

use std::time::Duration;

use device_ipc_broker_tests::{
    Answer, Child, Connection, Forged, FromExporter, NOBODY, Open, PINNING, Received, Refusal, ToExporter,
    agent, eventually, is_root, open_request, within,
};

use super::{HONEST, Scene};

/// How long a descriptor of the attack takes to close, in seconds.
const LINGER: u64 = 30;

/// The time limit of an honest call during an attack: less than the close of one lingering socket.
const PROMPT: Duration = Duration::from_secs(15);

/// A process of the user nobody.
fn stranger() -> Child {
    let mut stranger = agent!(PINNING);
    stranger.ok(&format!("become {NOBODY} {NOBODY}"));
    stranger
}

fn hex(message: &ToExporter) -> String {
    let bytes = postcard::to_stdvec(message).expect("it encodes");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn read(hex: &str) -> FromExporter {
    let bytes: Vec<u8> = (0..hex.len() / 2)
        .map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).expect("bytes in hex"))
        .collect();
    postcard::from_bytes(&bytes).unwrap_or_else(|error| panic!("{error}: {hex}"))
}

fn socket_of(forged: &Forged) -> String {
    String::from_utf8(forged.address().to_vec()).expect("a name of text")
}

/// Has a hostile process send lingering sockets to another one; returns their number. The receiver is stopped meanwhile, so that it
/// closes each of them last, and not the sender.
fn lingers(hostile: &mut Child, socket: &str, receiver: &Child) -> String {
    receiver.stop();
    let sent = hostile.ok(&format!("linger {socket} {LINGER} 4"));
    receiver.resume();
    sent
}

/// A lingering socket is closed by the thread that closes its last descriptor, for as long as its sender wants. The kernel
/// refuses such descriptors for the broker if it can (`SO_PASSRIGHTS`), and the test also simulates a kernel that cannot.
#[test]
fn open_while_other_user_sends_lingering_sockets_is_prompt() {
    if !is_root() {
        return;
    }
    for denied in ["", "deny passrights"] {
        let mut exporter = agent!(PINNING);
        if !denied.is_empty() {
            exporter.ok(denied);
        }
        let descriptor = exporter.share("x 4096");
        let mut stranger = stranger();
        let sent = lingers(&mut stranger, &socket_of(&Forged::of(&descriptor)), &exporter);
        let mut importer = agent!(PINNING);
        within(PROMPT, "an honest open", || importer.ok(&format!("open x {descriptor}")));
        println!("{denied:?}: {sent} lingering sockets were sent");
    }
}

#[test]
fn open_while_importer_sends_lingering_sockets_is_prompt() {
    for denied in ["", "deny passrights"] {
        let mut exporter = agent!(PINNING);
        if !denied.is_empty() {
            exporter.ok(denied);
        }
        let descriptor = exporter.share("x 4096");
        let mut hostile = agent!(PINNING);
        let socket = socket_of(&Forged::of(&descriptor));
        let sent = lingers(&mut hostile, &socket, &exporter);
        let mut importer = agent!(PINNING);
        within(PROMPT, "an honest open", || importer.ok(&format!("open x {descriptor}")));
        println!("{denied:?}: {sent} lingering sockets were sent");
    }
}

#[test]
fn accept_during_lingering_sockets_keeps_its_deadline() {
    if !is_root() {
        return;
    }
    for (denied, user) in [("", NOBODY), ("deny passrights", NOBODY), ("", 0), ("deny passrights", 0)] {
        let mut listener = agent!(PINNING);
        if !denied.is_empty() {
            listener.ok(denied);
        }
        let name = format!("linger{}", listener.id());
        listener.ok(&format!("listen {name}"));
        let mut hostile = if user == 0 { agent!(PINNING) } else { stranger() };
        lingers(&mut hostile, &format!("device-ipc.0.{name}"), &listener);
        let answer = within(PROMPT, "an accept of 500 ms", || listener.ask(&format!("accept {name} c 500")));
        let Answer::Failed(failure) = answer else { panic!("{answer:?}") };
        // One that may connect and sends descriptors to a kernel that cannot refuse them is an error of that connection.
        let variants = if user == 0 && !denied.is_empty() { ["Timeout", "Protocol"] } else { ["Timeout"; 2] };
        assert!(variants.contains(&failure.kind.as_str()), "{failure:?}");
    }
}

/// It learns which user refuses it, and nothing else.
#[test]
fn refused_user_learns_nothing_but_the_refusal() {
    if !is_root() {
        return;
    }
    let mut scene = Scene::new(PINNING);
    let hello = hex(&ToExporter::Hello { protocol: 1, program: "raw".into() });
    let open = hex(&open_request(&scene.forged, 1));
    let list = hex(&ToExporter::List { request: 1, after: 0 });
    let heard = stranger().ok(&format!("converse {} {hello} {open} {list}", socket_of(&scene.forged)));
    let heard: Vec<&str> = heard.split_whitespace().collect();
    let refusal = Refusal::UserNotAllowed { uid: NOBODY };
    assert_eq!(read(heard[0]), FromExporter::Refused { request: 0, refusal });
    assert_eq!(heard[1..], ["closed", "closed"]);
    let host = scene.forged.exporter().host;
    let host: String = host.iter().map(|byte| format!("{byte:02x}")).collect();
    assert!(!heard[0].contains(&host), "the id of the machine: {}", heard[0]);
    scene.is_unharmed();
}

/// A user whom one export allows asks for another one: whether there is such an export, and whether it knows the token, does
/// not show.
#[test]
fn export_of_another_user_looks_like_no_export() {
    if !is_root() {
        return;
    }
    let mut exporter = agent!(PINNING);
    exporter.ok(&format!("ipc allow-uid={NOBODY}"));
    let allowed = Forged::of(&exporter.share("allowed 4096"));
    exporter.ok("ipc");
    let other = Forged::of(&exporter.share("other 4096"));
    let unknown = ToExporter::Open(Open { export: 4711, ..other.open(1) });
    let packets = [
        ToExporter::Hello { protocol: 1, program: "raw".into() },
        open_request(&other, 1),
        open_request(&other.clone().with_token([7; 16]), 1),
        unknown,
        ToExporter::Stage(other.stage(1, &[])),
        ToExporter::List { request: 1, after: 0 },
        open_request(&allowed, 1),
    ];
    let packets: Vec<String> = packets.iter().map(hex).collect();
    let heard = stranger().ok(&format!("converse {} {}", socket_of(&allowed), packets.join(" ")));
    let heard: Vec<FromExporter> = heard.split_whitespace().map(read).collect();
    let dropped = FromExporter::Refused { request: 1, refusal: Refusal::Dropped };
    assert!(heard[1..5].iter().all(|answer| *answer == dropped), "{heard:?}");
    let FromExporter::Listing { exports, .. } = &heard[5] else { panic!("no listing: {heard:?}") };
    assert_eq!(exports.iter().map(|one| one.export).collect::<Vec<_>>(), [allowed.export()]);
    assert!(matches!(heard[6], FromExporter::Opened(_)), "{heard:?}");
    // If its export has been dropped, the error says so, and not that the user was never allowed.
    exporter.ok("close allowed 10000");
    let mut late = stranger();
    late.ok("ipc allow-uid=0");
    late.fails(&format!("open x {}", allowed.finish()), "ExportDropped");
}

#[test]
fn connections_of_other_users_take_no_descriptors() {
    if !is_root() {
        return;
    }
    let mut scene = Scene::new(PINNING);
    let mut stranger = stranger();
    for _ in 0..4 {
        stranger.ok(&format!("connect-many {} 250", socket_of(&scene.forged)));
        scene.serves_honest_peers();
    }
    let most = scene.before.all_descriptors() + 8;
    eventually("descriptors", true, || scene.exporter.census().all_descriptors() <= most);
    scene.is_unharmed();
}

/// Many processes of one user with a lease each leave the exporting program descriptors for its own purposes.
#[test]
fn importers_leave_the_program_half_of_its_descriptors() {
    const LIMIT: usize = 160;
    let mut scene = Scene::new(PINNING);
    scene.exporter.ok("allocate memory 4096");
    let before = scene.exporter.census();
    scene.exporter.ok(&format!("limit-descriptors {LIMIT}"));
    let mut swarm = agent!(PINNING);
    let opened: usize = swarm
        .ok(&format!("swarm {} 1 processes=100 open={}", socket_of(&scene.forged), scene.descriptor))
        .parse()
        .expect("a number");
    assert!((20..100).contains(&opened), "{opened} processes have the export open");
    let descriptors = scene.exporter.census().all_descriptors();
    assert!(descriptors < before.all_descriptors() + LIMIT / 2, "{descriptors} descriptors");
    scene.exporter.share("y 4096 of=memory");
    scene.exporter.ok("close y 10000");
    scene.honest.ok("touch x");
    swarm.ok("end-swarm");
    scene.honest.ok("touch x");
    eventually("the exporter has no more than before", true, || {
        scene.exporter.census().all_descriptors() <= before.all_descriptors()
    });
}

#[test]
fn descriptors_sent_to_a_broker_close_the_connection() {
    let gift = std::io::pipe().expect("a pipe").0;
    for (denied, count) in [("", 1), ("", 253), ("deny passrights", 1), ("deny passrights", 253)] {
        let mut exporter = agent!(PINNING);
        if !denied.is_empty() {
            exporter.ok(denied);
        }
        let forged = Forged::of(&exporter.share("x 4096"));
        let before = exporter.census().of_kind("pipe");
        let connection = Connection::greeted(&forged);
        let open = postcard::to_stdvec(&open_request(&forged, 1)).expect("it encodes");
        use std::os::fd::AsFd;
        match connection.send_bytes(&open, &vec![gift.as_fd(); count]) {
            Err(rustix::io::Errno::PERM) => {
                connection.send_bytes(&open, &[]).expect("it reads");
                assert!(matches!(connection.receive_message(), FromExporter::Opened(_)));
            }
            Ok(()) => assert!(matches!(connection.receive(HONEST), Received::Closed)),
            Err(error) => panic!("{error}"),
        }
        eventually("gifts", before, || exporter.census().of_kind("pipe"));
    }
}
