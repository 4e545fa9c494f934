//! Conditions that a sandbox or a kernel imposes: calls succeed, or fail with an error that says why.

use device_ipc_broker_tests::{Answer, PINNING, agent, is_root};

use super::Scene;

/// A system call that is not there is an error of the call that needs it, or is done without.
#[test]
fn missing_system_call_is_an_error_or_has_a_fallback() {
    for denied in ["memfd_create", "pidfd_open", "epoll_create1", "statx", "getrandom"] {
        let mut scene = Scene::new(PINNING);
        let mut exporter = agent!(PINNING);
        exporter.ok("allocate memory 4096");
        exporter.ok(&format!("deny {denied}"));
        match exporter.ask("share x 4096 of=memory") {
            Answer::Done(descriptor) => {
                let mut importer = agent!(PINNING);
                importer.ok(&format!("open x {descriptor}"));
                importer.ok("touch x");
            }
            Answer::Failed(failure) => {
                assert!(matches!(denied, "epoll_create1" | "getrandom"), "{denied}: {}", failure.text);
            }
            Answer::Ended(signal) => panic!("{denied}: the exporter ended by signal {signal:?}"),
        }
        let mut importer = agent!(PINNING);
        importer.ok(&format!("deny {denied}"));
        match importer.ask(&format!("open x {} timeout=2000", scene.descriptor)) {
            Answer::Done(_) => drop(importer.ok("touch x")),
            Answer::Failed(failure) => {
                // The mock's machine needs the first of them to open memory.
                let needed = ["pidfd_open", "epoll_create1", "memfd_create"];
                assert!(needed.contains(&denied), "{denied}: {}", failure.text);
            }
            Answer::Ended(signal) => panic!("{denied}: the importer ended by signal {signal:?}"),
        }
        drop(importer);
        scene.is_unharmed();
    }
}

#[test]
fn signals_at_every_moment_change_nothing() {
    let mut scene = Scene::new(PINNING);
    let mut importer = agent!(PINNING);
    scene.exporter.ok("alarms 1000");
    importer.ok("alarms 1000");
    for round in 0..50 {
        importer.ok(&format!("open y {}", scene.descriptor));
        importer.ok("touch y");
        importer.ok("drop y");
        importer.ok("close-unused 5000");
        if round % 10 == 0 {
            importer.ok(&format!("open z {} place=device:0 copying=always", scene.descriptor));
            importer.ok("drop z");
        }
    }
    drop(importer);
    scene.is_unharmed();
}

#[test]
fn sixteen_descriptors_suffice_or_the_error_names_the_limit() {
    let mut scene = Scene::new(PINNING);
    let mut importer = agent!(PINNING);
    importer.ok("limit-descriptors 16");
    match importer.ask(&format!("open y {} timeout=2000", scene.descriptor)) {
        Answer::Done(_) => drop(importer.ok("touch y")),
        Answer::Failed(failure) => assert_eq!(failure.kind, "Io", "{}", failure.text),
        Answer::Ended(signal) => panic!("it ended by signal {signal:?}"),
    }
    drop(importer);
    scene.is_unharmed();
}

#[test]
fn without_proc_or_shared_memory_directory_nothing_hangs() {
    if !is_root() {
        return;
    }
    let no_proc: &[&str] = &["unshare", "-m", "sh", "-c", "mount -t tmpfs none /proc && exec \"$0\" \"$@\""];
    let full_shm: &[&str] = &[
        "unshare",
        "-m",
        "sh",
        "-c",
        "mount -t tmpfs -o size=4k none /dev/shm && head -c 4096 /dev/zero > /dev/shm/full; exec \"$0\" \"$@\"",
    ];
    let mut scene = Scene::new(PINNING);
    for (what, through) in [("no /proc", no_proc), ("a full /dev/shm", full_shm)] {
        let mut importer = agent!(PINNING, through: through);
        match importer.ask(&format!("open y {} timeout=2000", scene.descriptor)) {
            Answer::Done(_) => drop(importer.ok("touch y")),
            Answer::Failed(failure) => {
                assert_eq!((what, failure.kind.as_str()), ("no /proc", "Io"), "{}", failure.text);
                assert!(failure.text.contains("/proc"), "{}", failure.text);
            }
            Answer::Ended(signal) => panic!("{what}: it ended by signal {signal:?}"),
        }
    }
    scene.is_unharmed();
}

#[test]
fn short_lived_importers_leave_the_exporter_as_it_was() {
    let mut scene = Scene::new(PINNING);
    for round in 0..30 {
        let mut importer = agent!(PINNING);
        importer.ok(&format!("open y {}", scene.descriptor));
        if round % 2 == 0 {
            importer.kill();
        }
    }
    scene.is_unharmed();
}
