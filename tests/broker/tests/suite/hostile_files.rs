//! Files that other programs, other users or an attacker put where sockets and locks are: none of them is removed, replaced
//! or waited for.

use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, PermissionsExt, chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use device_ipc_broker_tests::{Answer, Child, Directory, NOBODY, PINNING, agent, is_root};
use rustix::fs::{FlockOperation, flock};

/// Leaves the socket of a process that was killed.
fn dead_socket(directory: &Directory, name: &str) -> PathBuf {
    let path = directory.path().join(name);
    drop(UnixListener::bind(&path).expect("the name is free"));
    path
}

/// Returns an agent whose sockets are in the directory.
fn agent_in(directory: &Directory) -> Child {
    let mut child = agent!(PINNING);
    child.ok(&directory.ipc());
    child
}

fn is_there(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// A name of exactly the form that brokers give their sockets.
fn broker_name(random: u64) -> String {
    format!("device-ipc-{}-{random:016x}", std::process::id())
}

#[test]
fn sweep_of_a_directory_removes_dead_broker_sockets_only() {
    let directory = Directory::new("sweep");
    let dead = dead_socket(&directory, &broker_name(1));
    let mut kept = Vec::new();
    // connect(2) reports ECONNREFUSED for each of these.
    for name in ["device-ipc-weights.safetensors", &broker_name(2)] {
        let path = directory.path().join(name);
        fs::write(&path, b"weights").expect("it can be written");
        kept.push(path);
    }
    kept.push(dead_socket(&directory, "device-ipc-mine"));
    kept.push(dead_socket(&directory, "another-program"));
    let link = directory.path().join(broker_name(3));
    symlink(dead_socket(&directory, "behind-a-link"), &link).expect("a link");
    kept.push(link);
    if is_root() {
        let other = dead_socket(&directory, &broker_name(4));
        chown(&other, Some(NOBODY), Some(NOBODY)).expect("root may");
        kept.push(other);
    } else {
        println!("the socket of another user is left out: only root can make one");
    }
    agent_in(&directory).share("x 4096");
    let removed: Vec<_> = kept.iter().filter(|path| !is_there(path)).collect();
    assert_eq!(removed, Vec::<&PathBuf>::new(), "these were not ours to remove");
    assert!(!is_there(&dead), "the dead broker's socket was left");
}

#[test]
fn channel_listen_on_the_path_of_a_regular_file_leaves_the_file() {
    let directory = Directory::new("regular");
    let path = directory.path().join(format!("device-ipc.{}.files", rustix::process::geteuid().as_raw()));
    fs::write(&path, b"precious").expect("it can be written");
    let mut listener = agent_in(&directory);
    let text = listener.fails("listen files", "Io");
    assert!(text.contains("not a socket"), "{text}");
    assert_eq!(fs::read(&path).expect("it is there"), b"precious");
}

#[test]
fn channel_listen_over_a_dead_socket_of_another_user_leaves_it() {
    if !is_root() {
        println!("skipped: only root can make the socket of another user");
        return;
    }
    let directory = Directory::new("foreign");
    let path = dead_socket(&directory, "device-ipc.0.files");
    chown(&path, Some(NOBODY), Some(NOBODY)).expect("root may");
    let text = agent_in(&directory).fails("listen files", "Io");
    assert!(text.contains("stale socket of user 65534"), "{text}");
    assert!(fs::symlink_metadata(&path).expect("it is there").file_type().is_socket());
}

/// The sweep of one process falls between bind(2) and listen(2) of another one.
#[test]
fn sweep_during_bind_of_another_process_leaves_its_socket() {
    let directory = Directory::new("race");
    let mut starting = agent!(PINNING, dies_at: Some("listener:bound!stop"));
    starting.ok(&directory.ipc());
    starting.send("share x 4096");
    starting.has_stopped();
    let _swept = agent_in(&directory).share("y 4096");
    starting.resume();
    let Answer::Done(descriptor) = starting.receive() else { panic!("it shares") };
    let mut importer = agent!(PINNING);
    importer.ok(&format!("open x {descriptor}"));
    assert_eq!(importer.ok("touch x"), "1");
}

/// A process that was stopped for longer than its socket is kept starts again.
#[test]
fn socket_removed_as_abandoned_is_made_again() {
    let directory = Directory::new("stopped");
    let mut starting = agent!(PINNING, dies_at: Some("listener:bound!stop"));
    starting.ok(&directory.ipc());
    starting.send("share x 4096");
    starting.has_stopped();
    let entry = fs::read_dir(directory.path()).expect("it is there").flatten().next().expect("it is bound");
    age(&entry.path());
    let _swept = agent_in(&directory).share("y 4096");
    assert!(!is_there(&entry.path()));
    starting.resume();
    let Answer::Done(descriptor) = starting.receive() else { panic!("it shares") };
    agent!(PINNING).ok(&format!("open x {descriptor}"));
}

/// Makes a file an hour old.
fn age(path: &Path) {
    let hour = SystemTime::now() - Duration::from_secs(3600);
    let since = rustix::fs::Timespec {
        tv_sec: hour.duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_secs() as i64,
        tv_nsec: 0,
    };
    let times = rustix::fs::Timestamps { last_access: since, last_modification: since };
    let no_follow = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
    rustix::fs::utimensat(rustix::fs::CWD, path, &times, no_follow).expect("it is ours");
}

#[test]
fn unpublished_socket_is_swept_once_it_is_abandoned() {
    let directory = Directory::new("abandoned");
    let [young, old] = [5, 6]
        .map(|random| dead_socket(&directory, &broker_name(random).replace("device-ipc-", "device-ipc~")));
    age(&old);
    agent_in(&directory).share("x 4096");
    assert!(is_there(&young), "its maker may be about to publish it");
    assert!(!is_there(&old), "its maker is dead");
}

/// Every user with read access to a directory can lock it.
#[test]
fn locked_directory_delays_no_channel_listener() {
    let directory = Directory::new("lock");
    let reader = File::open(directory.path()).expect("it can be read");
    flock(&reader, FlockOperation::NonBlockingLockExclusive).expect("nobody else has it");
    let mut listener = agent_in(&directory);
    for command in ["listen files", "unlisten files"] {
        assert_eq!(listener.ok(command), "", "{command}");
    }
    assert_eq!(directory.entries(), 0, "something was left behind");
}

/// A process of the same user that is stopped during `listen` is waited for, with a time limit.
#[test]
fn channel_listen_with_its_name_locked_times_out() {
    let directory = Directory::new("held");
    let lock =
        directory.path().join(format!(".device-ipc.{}.files.lock", rustix::process::geteuid().as_raw()));
    let file = File::create(&lock).expect("a file");
    flock(&file, FlockOperation::NonBlockingLockExclusive).expect("nobody else has it");
    let mut listener = agent_in(&directory);
    listener.ok("hurry");
    let text = listener.fails("listen files", "Timeout");
    assert!(text.contains(".lock"), "{text}");
    // The file of a process that has died is no obstacle.
    drop(file);
    listener.ok("listen files");
    assert!(!is_there(&lock));
}

#[test]
fn channel_lock_that_is_no_file_of_ours_is_refused() {
    let directory = Directory::new("squatted");
    let lock =
        directory.path().join(format!(".device-ipc.{}.files.lock", rustix::process::geteuid().as_raw()));
    let mut listener = agent_in(&directory);
    let precious = directory.path().join("precious");
    fs::write(&precious, b"precious").expect("it can be written");
    symlink(&precious, &lock).expect("a link");
    listener.fails("listen files", "Io");
    assert_eq!(fs::read(&precious).expect("it is there"), b"precious");
    fs::remove_file(&lock).expect("it is ours");
    if is_root() {
        fs::write(&lock, b"").expect("it can be written");
        fs::set_permissions(&lock, fs::Permissions::from_mode(0o666)).expect("it is ours");
        chown(&lock, Some(NOBODY), Some(NOBODY)).expect("root may");
        let text = listener.fails("listen files", "Io");
        assert!(text.contains("regular file of this user"), "{text}");
    }
}
