use super::*;

const FORM: TextForm = TextForm { prefix: "dipcx1:", name: "thing", max_bytes: 100 };

fn decode(text: &str) -> Result<Vec<u8>, DescriptorError> {
    FORM.decode(text, |_| None)
}

fn encoded() -> (Vec<u8>, String) {
    let bytes: Vec<u8> = (0..60).collect();
    let text = format!("{}{}", FORM.prefix, BASE64URL_NOPAD.encode(&bytes));
    (bytes, text)
}

#[test]
fn copied_text_is_accepted() {
    let (bytes, text) = encoded();
    let wrapped = format!("  {}\r\n\t{}\n{}\n", &text[..3], &text[3..50], &text[50..]);
    for copied in [
        text.clone(),
        format!("\u{feff}{text}\r\n"),
        format!("\"{text}\""),
        format!("'{text}'\n"),
        format!("\u{feff} ` {text} `"),
        wrapped.clone(),
        format!("\"{wrapped}\""),
    ] {
        assert_eq!(decode(&copied).as_ref(), Ok(&bytes), "{copied:?}");
    }
}

#[test]
fn other_text_is_named() {
    let (_, text) = encoded();
    let error = |text: &str| decode(text).unwrap_err().to_string();
    assert!(error("").contains("found an empty text") && error(" \n").contains("found an empty text"));
    let prompt = error(&format!("user@host:~$ {text}"));
    assert!(prompt.contains("13 characters before it: \"user@hos\"…"), "{prompt}");
    assert!(error("\"/tmp/w\"").contains("found \"/tmp/w\""), "{}", error("\"/tmp/w\""));
    assert!(error(&format!("\"{text}")).contains("1 characters before it: \"\\\"\""), "a quote at one end");
    // The text of which the prefix was not copied may begin anywhere.
    let shown = error(&text[20..]);
    assert!(shown.contains(&text[20..28]) && !shown.contains(&text[20..29]), "{shown}");
    let behind = error(&format!("{text}\nuser@host:~$ "));
    assert!(behind.contains("character 84") && behind.contains("'@'"), "{behind}");
    assert!(error(&format!("{text}é")).contains("'é'"));
}

#[test]
fn size_is_limited_before_decoding() {
    let long = |repeated: &str, times| decode(&format!("{}{}", FORM.prefix, repeated.repeat(times)));
    assert!(matches!(long("A", 1000), Err(DescriptorError::TooLarge { found: 750 })));
    // One with white space that is not too long a text, and one that is not searched for white space.
    assert!(matches!(long("AAA ", 48), Err(DescriptorError::TooLarge { found: 108 })));
    assert!(matches!(long("A ", 1000), Err(DescriptorError::TooLarge { found: 1500 })));
}
