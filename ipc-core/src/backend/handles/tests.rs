use super::*;

#[test]
fn handle_bytes_round_trip_and_encode_like_a_sequence() {
    for length in [0_usize, 1, 64, 300] {
        let bytes: Vec<u8> = (0..length).map(|index| index as u8).collect();
        let handle = HandleBytes::new(bytes.clone());
        let packed = postcard::to_stdvec(&handle).unwrap();
        assert_eq!(packed, postcard::to_stdvec(&bytes).unwrap(), "{length} bytes");
        assert_eq!(postcard::from_bytes::<HandleBytes>(&packed).unwrap(), handle);
        assert!(postcard::from_bytes::<HandleBytes>(&packed[..length.min(packed.len() - 1)]).is_err());
        let text = serde_json::to_string(&handle).unwrap();
        assert_eq!(text, serde_json::to_string(&bytes).unwrap());
        assert_eq!(serde_json::from_str::<HandleBytes>(&text).unwrap(), handle);
    }
}
