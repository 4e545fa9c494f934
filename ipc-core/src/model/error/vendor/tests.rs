use super::*;

#[test]
fn message_and_hint_are_part_of_the_text() {
    let error = VendorError::new("mock", "open", VendorStatus(7), "MOCK_BROKEN");
    assert_eq!(error.to_string(), "open failed with MOCK_BROKEN (7)");
    let error = error.with_message("no such handle").with_hint("Share it again");
    assert_eq!(error.to_string(), "open failed with MOCK_BROKEN (7): no such handle. Share it again");
}
