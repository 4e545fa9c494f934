use super::*;

fn entry(ip: &str, port: u16) -> Vec<u8> {
    let ip: Ipv6Addr = ip.parse().unwrap();
    [&ip.octets()[..], &port.to_be_bytes()].concat()
}

fn read_all(body: &[u8]) -> Result<Vec<SocketAddr>, DescriptorError> {
    read(&mut &*body)
}

#[test]
fn addresses_of_both_families_are_read() {
    let body = [entry("::ffff:10.0.0.1", 4711), entry("fd00::7", 1)].concat();
    let expected: Vec<SocketAddr> = vec!["10.0.0.1:4711".parse().unwrap(), "[fd00::7]:1".parse().unwrap()];
    assert_eq!(read_all(&body).unwrap(), expected);
    let mut written = Vec::new();
    write(&expected, &mut written);
    assert_eq!(written, [&[7, 0, 0, 0, 36, 0, 0, 0][..], &body].concat(), "it is not critical");
}

#[test]
fn addresses_of_no_process_are_refused() {
    for (ip, port) in [("10.0.0.1", 0), ("0.0.0.0", 1), ("224.0.0.1", 1)] {
        let error = read_all(&entry(&format!("::ffff:{ip}"), port)).unwrap_err();
        assert!(error.to_string().contains(ip), "{error}");
    }
    for body in [&[][..], &[0; 17], &entry("::1", 1).repeat(MAX_ADDRESSES + 1)] {
        read_all(body).unwrap_err();
    }
}
