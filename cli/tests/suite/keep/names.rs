//! Names of keepers: who may use them, and their list.

use std::os::unix::process::CommandExt;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use rustix::process::Signal;
use serde_json::Value;

use super::{ipc, keep, model, open, unique, values};
use crate::support::{Directory, Terminal, device_ipc, run, start_in};

/// The user `nobody`.
const NOBODY: u32 = 65534;

#[test]
fn second_keeper_of_a_name_is_refused_before_it_loads() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[1.0])]);
    let name = unique("twice");
    let keeper = keep(&[&file, "--name", &name]);
    // The files are not looked at.
    let error = run(["keep", "/nowhere/m.safetensors", "--name", &name]).bad();
    let pid = keeper.pid().to_string();
    for text in ["already", &pid, "--hand-over", "another --name"] {
        assert!(error.contains(text), "{text}: {error}");
    }
    let ipc = ipc();
    assert_eq!(values(&ipc, &open(&ipc, &name).unwrap().1, "w"), [1.0]);
}

#[test]
fn invalid_name_is_wrong_usage() {
    for name in ["", "a/b", "a b", &"x".repeat(49)] {
        let error = run(["keep", "/nowhere", "--name", name]).usage();
        assert!(error.contains("48 ASCII letters"), "{name:?}: {error}");
    }
    assert!(run(["keep", "/nowhere"]).usage().contains("--name"));
    assert!(run(["keep", "--name", "x"]).usage().contains("--hand-over"));
}

#[test]
fn list_shows_keepers_with_version_and_size() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[1.0, 2.0]), ("v", &[1.0])]);
    let name = unique("listed");
    let keeper = keep(&[&file, "--name", &name]);
    let listed = run(["keep", "--list", "--json"]).good();
    let listed: Value = serde_json::from_str(&listed).expect("JSON");
    let one = listed["keepers"].as_array().unwrap().iter().find(|one| one["name"] == *name).expect("listed");
    assert_eq!(one["pid"].as_u64(), Some(keeper.pid().into()), "{one}");
    assert_eq!((one["version"].as_u64(), one["tensors"].as_u64()), (Some(1), Some(2)), "{one}");
    assert_eq!((one["access"].as_str(), one["backend"].as_str()), (Some("read-only"), Some("mock")), "{one}");
    let table = run(["keep", "--list"]).good();
    assert!(table.contains(&name) && table.contains("readers"), "{table}");
    // A keeper that is stopped is listed with its error.
    keeper.suspend();
    let listed = run(["keep", "--list", "--json", "--timeout", "200ms"]).good();
    let listed: Value = serde_json::from_str(&listed).expect("JSON");
    let one = listed["keepers"].as_array().unwrap().iter().find(|one| one["name"] == *name).expect("listed");
    assert!(one["error"].is_string(), "{one}");
    keeper.signal(Signal::CONT);
}

/// Names of this user that sockets occupy in any number: the list asks them with few threads, in one timeout.
#[test]
fn list_beside_many_silent_names_starts_few_threads() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[1.0])]);
    let name = unique("0-found");
    let _keeper = keep(&[&file, "--name", &name]);
    let uid = rustix::process::geteuid().as_raw();
    let _silent: Vec<_> = (0..300)
        .map(|index| {
            let address = format!("device-ipc.{uid}.keeper.silent-{}-{index}", std::process::id());
            let address = SocketAddrUnix::new_abstract_name(address.as_bytes()).unwrap();
            let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
            let socket = socket.unwrap();
            bind(&socket, &address).unwrap();
            listen(&socket, 8).unwrap();
            socket
        })
        .collect();
    let mut command = device_ipc();
    command.args(["keep", "--list", "--json", "--timeout", "5s"]);
    let mut list = Terminal::start(command);
    let mut threads = 0;
    while list.is_running() {
        let entries = std::fs::read_dir(format!("/proc/{}/task", list.pid()));
        threads = threads.max(entries.map_or(0, Iterator::count));
        std::thread::yield_now();
    }
    assert!(threads < 100, "{threads} threads");
    let listed: Value = serde_json::from_str(&list.wait().good()).expect("JSON");
    let keepers = listed["keepers"].as_array().unwrap();
    assert!(keepers.iter().any(|one| one["name"] == *name && one["version"] == 1), "{listed}");
}

#[test]
fn keeper_in_a_socket_directory_is_found_and_replaces_a_killed_one() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[3.0])]);
    let sockets = directory.text("sockets");
    std::fs::create_dir(&sockets).unwrap();
    let name = unique("directory");
    let command = |arguments: &[&str]| start_in(&sockets, arguments);
    for _ in 0..2 {
        let mut keeper = command(&["keep", &file, "--name", &name]);
        keeper.until("keeps version");
        let read = command(&["attach", &format!("keeper:{name}"), "read", "--tensor", "w"]).wait().good();
        assert!(read.contains("mean=3.0"), "{read}");
        assert!(command(&["keep", "--list"]).wait().good().contains(&name));
        keeper.kill();
        // Its socket is still there, and is not waited for: this timeout is longer than the program may run.
        let listed = command(&["keep", "--list", "--timeout", "1000s"]).wait().good();
        assert!(!listed.contains(&name), "{listed}");
    }
}

/// Another user can open weights if both processes allow it, and cannot take the name over.
#[test]
fn other_user_needs_the_permission_of_both_sides() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can start a process of another user");
        return;
    }
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[4.0])]);
    let at = |name: &str| format!("keeper:0/{name}");
    // The mock's own kind of memory can be opened by its user only.
    let command = |arguments: &[&str]| {
        let mut command = device_ipc();
        command.args(arguments).env("DEVICE_IPC_MOCK", "devices=2;like=cuda");
        command
    };
    let as_nobody = |arguments: &[&str]| {
        let mut command = command(arguments);
        command.uid(NOBODY).gid(NOBODY).current_dir("/");
        Terminal::start(command).wait()
    };
    if !as_nobody(&["--version"]).status.success() {
        eprintln!("skipped: the user nobody cannot execute the program");
        return;
    }
    let (closed, allowed) = (unique("closed"), unique("allowed"));
    let keep = |arguments: &[&str]| {
        let mut keeper = Terminal::start(command(arguments));
        keeper.until("keeps version");
        keeper
    };
    let _closed = keep(&["keep", &file, "--name", &closed]);
    let _allowed = keep(&["keep", &file, "--name", &allowed, "--allow-user", &NOBODY.to_string()]);
    let read = |name: &str, more: &[&str]| {
        let at = at(name);
        let mut arguments = vec!["attach", &at, "read", "--tensor", "w", "--timeout", "5s"];
        arguments.extend(more);
        as_nobody(&arguments)
    };
    for (name, more) in [(&closed, &["--allow-user", "0"][..]), (&allowed, &[])] {
        let error = read(name, more).bad();
        assert!(error.contains("allow"), "{error}");
    }
    let good = read(&allowed, &["--allow-user", "0"]).good();
    assert!(good.contains("mean=4.0"), "{good}");
    // Under its own uid the name is another one; that of root's keeper cannot be taken.
    let error =
        as_nobody(&["keep", "--hand-over", "--name", &allowed, "--allow-user", "0", "--timeout", "100ms"])
            .bad();
    assert!(error.contains("no keeper"), "{error}");
    let listed = as_nobody(&["keep", "--list", "--allow-user", "0"]).good();
    assert!(listed.contains(&allowed) && !listed.contains(&closed), "{listed}");
}
