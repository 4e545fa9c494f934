use super::*;

#[test]
fn invalid_name_is_rejected_with_reason() {
    for (name, why) in [
        ("", "empty"),
        ("a/b", "letters"),
        ("ä", "letters"),
        ("a b", "letters"),
        ("\0", "letters"),
        ("10.0.0.1:29531", "TCP, with a key"),
    ] {
        let text = address(name, 7, None).unwrap_err().to_string();
        assert!(text.contains(why), "{text}");
    }
    assert!(address(&"x".repeat(65), 7, None).is_err());
    let longest = "x".repeat(64);
    let BrokerAddress::Abstract(bytes) = address(&longest, 7, None).unwrap() else { panic!("no directory") };
    assert_eq!(*bytes, *format!("device-ipc.7.{longest}").as_bytes());
    assert!(address("a.b-c_D9", 7, Some(Path::new("/run"))).is_ok());
}

#[test]
fn too_long_directory_is_rejected() {
    let directory = |len: usize| PathBuf::from(format!("/{}", "d".repeat(len - 1)));
    let longest = MAX_ADDRESS_BYTES - "/device-ipc.7.x".len();
    assert!(address("x", 7, Some(&directory(longest))).is_ok());
    assert!(matches!(address("x", 7, Some(&directory(longest + 1))), Err(Error::Io { .. })));
}
