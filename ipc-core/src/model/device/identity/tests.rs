use super::*;

#[test]
fn uuid_text_round_trips_in_standard_groups() {
    let bytes: [u8; 16] = std::array::from_fn(|index| index as u8);
    let text = DeviceIdentity::Uuid(bytes).to_string();
    assert_eq!(text, "00010203-0405-0607-0809-0a0b0c0d0e0f");
    assert_eq!(parse_hex(&text), Some(bytes));
}

#[test]
fn local_host_id_is_constant() {
    assert_eq!(HostId::local(), HostId::local());
}
