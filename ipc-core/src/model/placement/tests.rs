use super::*;

const A: DeviceIdentity = DeviceIdentity::Uuid([1; 16]);
const B: DeviceIdentity = DeviceIdentity::Uuid([2; 16]);

#[test]
fn map_with_repeated_device_is_rejected() {
    let map = DeviceMap::new().insert(A, 1).unwrap();
    assert_eq!(map.get(A), Some(1.into()));
    assert_eq!(map.get(B), None);
    assert!(matches!(map.clone().insert(A, 0), Err(Error::InvalidDeviceMap(_))));
    assert!(matches!(map.clone().insert(B, 1), Err(Error::InvalidDeviceMap(_))));
    assert!(map.insert(B, 0).is_ok());
}

#[test]
fn device_on_both_sides_is_accepted() {
    let map = DeviceMap::new().insert(0, 1).unwrap().insert(1, 0).unwrap();
    assert_eq!(map.get(0), Some(1.into()));
}

#[test]
fn ordinal_of_the_sender_is_rejected_without_a_channel() {
    let map = DeviceMap::new().insert(A, 0).unwrap();
    assert_eq!(map.device_for(A).unwrap(), 0.into());
    assert!(matches!(map.device_for(B), Err(Error::NotInDeviceMap { peer: None, .. })));
    let text = map.insert(1, 2).unwrap().device_for(B).unwrap_err().to_string();
    assert!(text.contains("device 1 to 2") && text.contains("Descriptor::home"), "{text}");
}
