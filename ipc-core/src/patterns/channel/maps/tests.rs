use super::*;

const A: DeviceIdentity = DeviceIdentity::Uuid([1; 16]);
const B: DeviceIdentity = DeviceIdentity::Uuid([2; 16]);
const C: DeviceIdentity = DeviceIdentity::Uuid([3; 16]);

fn map(pairs: &[(DeviceName, DeviceName)]) -> DeviceMap {
    pairs.iter().fold(DeviceMap::new(), |map, (from, to)| map.insert(*from, *to).unwrap())
}

fn maps(own: (&[DeviceIdentity], &DeviceMap), peer: (&[DeviceIdentity], &DeviceMap)) -> Result<Maps> {
    let end = |(devices, map)| EndDevices { devices, map };
    Maps::resolve(end(own), end(peer))
}

#[test]
fn end_without_map_uses_inverse_of_peer_map() {
    let own = map(&[(0.into(), 1.into()), (1.into(), A.into())]);
    let found = maps((&[A, B], &own), (&[A, C], &DeviceMap::new())).unwrap();
    let (outgoing, incoming) = (found.outgoing.unwrap(), found.incoming.unwrap());
    assert_eq!([outgoing.get(A), outgoing.get(B), outgoing.get(C)], [Some(C), Some(A), None]);
    assert_eq!([incoming.get(C), incoming.get(A), incoming.get(B)], [Some(A), Some(B), None]);
    // The other end gets the same result.
    let far = maps((&[A, C], &DeviceMap::new()), (&[A, B], &own)).unwrap();
    assert_eq!((far.incoming, far.outgoing), (Some(outgoing), Some(incoming)));
}

#[test]
fn both_maps_apply_and_no_map_resolves_to_none() {
    let (own, peer) = (map(&[(0.into(), 0.into())]), map(&[(0.into(), 1.into())]));
    let found = maps((&[A, B], &own), (&[C], &peer)).unwrap();
    assert_eq!(found.outgoing.unwrap().get(A), Some(C));
    assert_eq!(found.incoming.unwrap().get(C), Some(B));
    let none = maps((&[A], &DeviceMap::new()), (&[B], &DeviceMap::new())).unwrap();
    assert_eq!(none, Maps::default());
}

#[test]
fn unknown_device_error_names_pair_and_side() {
    let none = DeviceMap::new();
    let cases: [(&[(DeviceName, DeviceName)], &str); 4] = [
        (&[(2.into(), 0.into())], "device 2 to 0 of this process's map: the sender sees no device 2"),
        (&[(0.into(), 7.into())], "the receiver sees no device 7, it sees 1 device(s), numbered from 0"),
        (&[(0.into(), B.into())], "the receiver sees no device 02020202"),
        (&[(0.into(), A.into()), (A.into(), 0.into())], "by its ordinal that another pair names"),
    ];
    for (pairs, phrase) in cases {
        let text = maps((&[A, B], &map(pairs)), (&[A], &none)).unwrap_err().to_string();
        assert!(text.contains(phrase), "{text}");
    }
    let text = maps((&[A], &none), (&[B], &map(&[(0.into(), 4.into())]))).unwrap_err().to_string();
    assert!(text.contains("the peer's map: the receiver sees no device 4"), "{text}");
}

#[test]
fn own_map_is_checked_before_a_peer_is_known() {
    let check =
        |pairs: &[(DeviceName, DeviceName)]| check_own(EndDevices { devices: &[A], map: &map(pairs) });
    let text = check(&[(2.into(), 0.into())]).unwrap_err().to_string();
    assert!(text.contains("device 2 to 0 of this process's map: the sender sees no device 2"), "{text}");
    assert!(check(&[(B.into(), 0.into())]).is_err());
    // The devices of the receiver are not known yet.
    check(&[(0.into(), 7.into())]).unwrap();
    check(&[(A.into(), B.into())]).unwrap();
}
