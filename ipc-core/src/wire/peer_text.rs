//! Texts of other processes, for display.

use crate::model::printable::printable;

/// Maximum length of a peer's program name in bytes; the rest is cut off.
const MAX_PROGRAM_BYTES: usize = 64;

/// Returns a program's name for display: cut to a maximum length, and [`printable`].
pub(crate) fn short_name(name: &str) -> String {
    shortened(name, MAX_PROGRAM_BYTES)
}

/// Maximum length of a peer's error text in bytes; the rest is cut off.
const MAX_DETAIL_BYTES: usize = 2048;

/// Returns a peer's error text for display.
pub(crate) fn short_detail(detail: &str) -> String {
    shortened(detail, MAX_DETAIL_BYTES)
}

fn shortened(text: &str, most_bytes: usize) -> String {
    let cut = |text: &str| -> String {
        let fits = |(start, c): &(usize, char)| start + c.len_utf8() <= most_bytes;
        text.char_indices().take_while(fits).map(|(_, c)| c).collect()
    };
    // Cut twice: a replaced character may be longer, and the first cut bounds the work.
    cut(&printable(&cut(text)))
}

#[cfg(test)]
mod tests {
    use super::short_name;

    #[test]
    fn long_name_is_cut_between_characters() {
        assert_eq!(short_name("python3"), "python3");
        assert_eq!(short_name(&"ü".repeat(40)).len(), 64);
        assert_eq!(short_name(&format!("x{}", "ü".repeat(40))).len(), 63);
        assert_eq!(short_name("a\u{1b}[2J\nb"), "a\u{fffd}[2J\u{fffd}b");
        assert_eq!(short_name(&"\u{7}".repeat(64)).len(), 63);
    }
}
