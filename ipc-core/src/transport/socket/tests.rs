use super::*;
use rustix::net::socketpair;

fn pair() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

#[test]
fn messages_keep_their_bounds_and_their_descriptors() {
    let (near, far) = pair();
    let mut buffer = Vec::new();
    assert_eq!(receive(far.as_fd(), &mut buffer).unwrap_err(), Errno::AGAIN);
    send(near.as_fd(), b"one", &[near.as_fd(), far.as_fd()]).unwrap();
    send(near.as_fd(), b"two", &[]).unwrap();
    let one = receive(far.as_fd(), &mut buffer).unwrap().unwrap();
    assert_eq!((one.bytes.as_slice(), one.fds.len()), (&b"one"[..], 2));
    let two = receive(far.as_fd(), &mut buffer).unwrap().unwrap();
    assert_eq!((two.bytes.as_slice(), two.fds.len()), (&b"two"[..], 0));
    // Unclaimed descriptors are closed on another thread.
    drop(one.fds.take());
    drop(near);
    assert!(receive(far.as_fd(), &mut buffer).unwrap().is_none());
}

#[test]
fn plain_receive_leaves_a_message_with_descriptors_in_the_queue() {
    let (near, far) = pair();
    let far = PeerSocket::new(far, true);
    let mut buffer = Vec::new();
    assert_eq!(far.take_plain(&mut buffer), Err(Errno::AGAIN));
    send(near.as_fd(), b"one", &[]).unwrap();
    send(near.as_fd(), b"two", &[near.as_fd()]).unwrap();
    assert_eq!(far.take_plain(&mut buffer), Ok(PlainMessage::Bytes(3)));
    assert_eq!(far.take_plain(&mut buffer), Ok(PlainMessage::WithDescriptors));
    assert_eq!(far.take_plain(&mut buffer), Ok(PlainMessage::WithDescriptors));
    let two = receive(far.fd(), &mut buffer).unwrap().unwrap();
    assert_eq!((two.bytes.as_slice(), two.fds.len()), (&b"two"[..], 1));
    drop((near, two.fds.take()));
    assert_eq!(far.take_plain(&mut buffer), Ok(PlainMessage::Closed));
}

/// A message that arrives between the look and the receive must not be received.
#[test]
fn plain_receive_never_takes_a_message_that_it_has_not_looked_at() {
    // A receive without a look takes every second message.
    const ROUNDS: usize = 200;
    let (ask, asked) = std::sync::mpsc::sync_channel::<OwnedFd>(0);
    let sender = std::thread::spawn(move || {
        for near in asked {
            send(near.as_fd(), b"two", &[near.as_fd()]).unwrap();
        }
    });
    let mut buffer = Vec::new();
    for round in 0..ROUNDS {
        let (near, far) = pair();
        let far = PeerSocket::new(far, true);
        ask.send(near).unwrap();
        let taken = loop {
            match far.take_plain(&mut buffer) {
                Err(Errno::AGAIN) => std::hint::spin_loop(),
                taken => break taken.unwrap(),
            }
        };
        assert_eq!(taken, PlainMessage::WithDescriptors, "round {round}");
    }
    drop(ask);
    sender.join().unwrap();
}

#[test]
fn refused_descriptors_cannot_be_sent_until_they_are_accepted() {
    let (near, far) = pair();
    if !refuse_fds(far.as_fd()) {
        println!("skipped: this kernel does not know SO_PASSRIGHTS (before Linux 6.16)");
        return;
    }
    let mut far = PeerSocket::new(far, false);
    assert_eq!(send(near.as_fd(), b"one", &[near.as_fd()]), Err(Errno::PERM));
    far.accept_fds();
    send(near.as_fd(), b"one", &[near.as_fd()]).unwrap();
    assert_eq!(far.take_plain(&mut Vec::new()), Ok(PlainMessage::WithDescriptors));
}

#[test]
fn oversized_message_is_rejected_as_a_whole() {
    let (near, far) = pair();
    send(near.as_fd(), &vec![7; MAX_MESSAGE_BYTES + 1], &[near.as_fd()]).unwrap();
    assert_eq!(receive(far.as_fd(), &mut Vec::new()).unwrap_err(), Errno::MSGSIZE);
}

#[test]
fn peer_that_does_not_read_does_not_block_the_sender() {
    let (near, _far) = pair();
    let sent = (0..100_000).find_map(|_| send(near.as_fd(), &[0; 1024], &[]).err());
    assert_eq!(sent, Some(Errno::AGAIN));
}

#[test]
fn receiver_sleeps_until_message_end_or_timeout() {
    let (near, far) = pair();
    let mut buffer = Vec::new();
    limit_receive_time(far.as_fd(), Duration::from_millis(20)).unwrap();
    let begin = Instant::now();
    assert_eq!(take_asleep(far.as_fd(), &mut buffer).unwrap_err(), Errno::AGAIN);
    // The kernel counts in ticks.
    assert!(begin.elapsed() >= Duration::from_millis(10));
    assert_eq!(take(far.as_fd(), &mut buffer).unwrap_err(), Errno::AGAIN, "this one never sleeps");
    limit_receive_time(far.as_fd(), Duration::from_secs(60)).unwrap();
    let length = || take_asleep(far.as_fd(), &mut Vec::new()).unwrap().map(|taken| taken.len);
    std::thread::scope(|scope| {
        let asleep = scope.spawn(length);
        send(near.as_fd(), b"one", &[]).unwrap();
        assert_eq!(asleep.join().unwrap(), Some(3));
        let asleep = scope.spawn(length);
        drop(near);
        assert_eq!(asleep.join().unwrap(), None, "the end of the connection");
    });
}

#[test]
fn kernel_reports_the_identity_of_the_peer() {
    let (near, _far) = pair();
    let peer = peer_credentials(&near).unwrap();
    assert_eq!(peer.pid, std::process::id());
    assert_eq!(peer.uid, rustix::process::geteuid().as_raw());
}
