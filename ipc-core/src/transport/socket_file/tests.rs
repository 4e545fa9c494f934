use super::*;

#[test]
fn socket_name_of_another_form_is_not_ours() {
    let name = SocketName::new().unwrap();
    assert!(SocketName::is_published(name.published().as_bytes()));
    assert!(SocketName::is_unpublished(name.unpublished().as_bytes()));
    assert_eq!(name.published().len(), name.unpublished().len());
    for other in [
        "device-ipc-weights.safetensors",
        "device-ipc-1-0123456789abcde",
        "device-ipc-1-0123456789abcdef0",
        "device-ipc-1-0123456789ABCDEF",
        "device-ipc--0123456789abcdef",
        "device-ipc-12345678901-0123456789abcdef",
        "device-ipc-1x-0123456789abcdef",
        "device-ipc.0.weights",
        "device-ipc-",
    ] {
        assert!(!SocketName::is_published(other.as_bytes()), "{other}");
    }
}
