use super::*;

#[test]
fn printable_text_has_no_controls_and_keeps_the_rest() {
    assert_eq!(printable("büro-7 (日本)"), "büro-7 (日本)");
    assert_eq!(printable("a\u{1b}[2Jb\n\t\r\0c"), "a\u{fffd}[2Jb\u{fffd}\u{fffd}\u{fffd}\u{fffd}c");
    for harmful in ["\u{9b}", "\u{202e}", "\u{2066}", "\u{200b}", "\u{feff}", "\u{7f}", "\u{e0041}"] {
        assert_eq!(printable(harmful), "\u{fffd}", "{harmful:?}");
    }
}
