use super::*;

#[test]
fn too_many_elements_for_the_host_are_an_error() {
    for count in [u64::MAX, u64::MAX / 8, 1 << 61] {
        let error = zeroed::<f64>(count).unwrap_err().to_string();
        assert!(error.contains("reserving host memory") && error.contains("8 B"), "{error}");
    }
    assert_eq!(zeroed::<f64>(2).unwrap(), [0.0, 0.0]);
}
