use super::*;

#[test]
fn name_is_parsed_with_and_without_scheme_and_user() {
    assert_eq!(parse("llama"), (None, "llama"));
    assert_eq!(parse("keeper:llama"), (None, "llama"));
    assert_eq!(parse("keeper:1000/llama"), (Some(1000), "llama"));
    assert_eq!(parse("keeper:alice/llama"), (None, "alice/llama"));
    assert_eq!(channel_name("llama-3.1_8B").unwrap(), "keeper.llama-3.1_8B");
}

#[test]
fn invalid_name_is_rejected_with_reason() {
    for (name, why) in [("", "empty"), ("alice/llama", "number of a user"), (&*"x".repeat(49), "48 B")] {
        let text = channel_name(name).unwrap_err().to_string();
        assert!(text.contains(why), "{text}");
    }
}
