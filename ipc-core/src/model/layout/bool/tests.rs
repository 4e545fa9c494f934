use super::*;

#[test]
fn every_byte_but_zero_is_true() {
    for byte in 0..=u8::MAX {
        let value = Bool(byte);
        assert_eq!(bool::from(value), byte != 0);
        assert_eq!(value, Bool::from(byte != 0));
        assert_eq!(format!("{value:?}"), (byte != 0).to_string());
    }
    assert_eq!((Bool::from(true).0, Bool::from(false).0), (1, 0), "PyTorch reads 0 and 1");
}
