//! The names in the lists.

/// Returns the path that a line is about.
pub(super) fn path(line: &str) -> &str {
    line.split_once(": ").map_or(line, |(path, _)| path)
}

/// Returns the name of a field, a variant or an associated item; nothing for a comment.
pub(super) fn member_name(declaration: &str) -> &str {
    let mut rest = declaration;
    // Attributes and keywords.
    while let Some(behind) = rest.strip_prefix("#[") {
        rest = behind.split_once(']').map_or("", |(_, behind)| behind.trim_start());
    }
    while let Some((word, behind)) = rest.split_once(' ') {
        if !["pub", "const", "async", "unsafe", "extern", "\"C\"", "fn", "type"].contains(&word) {
            break;
        }
        rest = behind;
    }
    let end = rest.find(|character: char| !character.is_alphanumeric() && character != '_');
    &rest[..end.unwrap_or(rest.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn member_has_its_name() {
        for (declaration, name) in [
            ("pub const fn new(x: u8) -> Self", "new"),
            ("pub unsafe fn share<T>(self)", "share"),
            ("#[must_use] pub fn f()", "f"),
            ("const K: usize", "K"),
            ("type Ty: Clone", "Ty"),
            ("pub field: u8", "field"),
            ("Variant(u8)", "Variant"),
            ("Unit", "Unit"),
            ("/* private fields */", ""),
        ] {
            assert_eq!(member_name(declaration), name, "{declaration}");
        }
    }

    #[test]
    fn line_begins_with_its_path() {
        assert_eq!(path("a::B::c: pub fn c(x: u8)"), "a::B::c");
    }
}
