//! The descriptors for event loops in a process that has none left.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use device_ipc::mock::MockBackend;
use device_ipc::{Error, Ipc, Result};
use device_ipc_test_process::alone;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const TIMEOUT: Duration = Duration::from_secs(30);

#[test]
fn descriptor_that_cannot_be_created_is_an_error() {
    // The limit is that of the whole process.
    alone!();
    let ipc = Ipc::with_backend(MockBackend::from_spec("devices=1").expect("a valid machine"));
    let memory = || ipc.allocate(0, 4096).expect("memory");
    let export = ipc.share(memory()).start().expect("shared");
    let ring = ipc.ring(memory()).start().expect("a ring");
    let reader = ipc.open_ring(ring.descriptor()).at_home().expect("a reader");
    let name = format!("descriptors-{}", std::process::id());
    let listener = ipc.listen(&name).start().expect("the name is new");
    let (channel, other) = std::thread::scope(|scope| {
        let accepting = scope.spawn(|| listener.accept(TIMEOUT).expect("one connects"));
        let connected = ipc.connect(&name).timeout(TIMEOUT).start().expect("it listens");
        (accepting.join().expect("no panic"), connected)
    });
    let (sender, receiver) = other.split();

    let before = getrlimit(Resource::Nofile);
    // No number below the limit is free: the first one that a new descriptor would get.
    let next = rustix::io::dup(rustix::stdio::stdin()).expect("there is one left").as_raw_fd() as u64;
    setrlimit(Resource::Nofile, Rlimit { current: Some(next), ..before }).expect("a lower limit");
    let without = [
        number(export.try_as_fd()),
        number(ring.try_as_fd()),
        number(reader.try_as_fd()),
        number(channel.try_as_fd()),
        number(sender.try_as_fd()),
        number(receiver.try_as_fd()),
    ];
    setrlimit(Resource::Nofile, before).expect("the limit of before");
    for failed in without {
        let Err(Error::Io { what, cause }) = failed else {
            panic!("a descriptor beyond the limit: {failed:?}")
        };
        assert_eq!(cause.raw_os_error(), Some(libc::EMFILE), "{what}");
    }

    // Nothing of it stays: the next calls succeed.
    assert_eq!(number(export.try_as_fd()).expect("there are some"), export.as_fd().as_raw_fd());
    assert_eq!(number(ring.try_as_fd()).expect("there are some"), ring.as_raw_fd());
    assert_eq!(number(reader.try_as_fd()).expect("there are some"), reader.as_raw_fd());
    assert_eq!(number(channel.try_as_fd()).expect("there are some"), channel.as_raw_fd());
    assert_eq!(number(sender.try_as_fd()).expect("there are some"), sender.as_raw_fd());
    assert_eq!(number(receiver.try_as_fd()).expect("there are some"), receiver.as_raw_fd());
}

fn number(descriptor: Result<BorrowedFd<'_>>) -> Result<i32> {
    descriptor.map(|descriptor| descriptor.as_raw_fd())
}
