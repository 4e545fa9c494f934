use super::*;
use crate::transport::socket;
use crate::wire::channel::OutgoingPacket;

#[test]
fn packets_of_a_whole_window_fit_into_a_socket() {
    let (near, _far) = socket::pair().unwrap();
    let message = vec![7; MAX_WHOLE_BYTES];
    for _ in 0..WINDOW.messages {
        let outgoing = OutgoingPacket::relayed(&message, MAX_WHOLE_BYTES).unwrap();
        assert!(outgoing.file.is_none());
        socket::send(near.as_fd(), &outgoing.packet, &[]).unwrap();
    }
    assert!(OutgoingPacket::relayed(&[7; MAX_WHOLE_BYTES + 1], MAX_WHOLE_BYTES).unwrap().file.is_some());
}
