//! The text form of descriptors and grants: a prefix, and the binary form in URL-safe Base64 without padding (RFC 4648 §5).
//!
//! A text that people copy arrives with a byte order mark, in quotes, or wrapped by a terminal or a mail. A reader accepts
//! these, because nothing of them occurs in a text form; an error names everything else that it finds.

use std::borrow::Cow;
use std::fmt;

use data_encoding::BASE64URL_NOPAD;

use crate::model::error::DescriptorError;

/// Maximum number of characters that an error shows of a text: fewer than a token has.
const SHOWN_CHARS: usize = 8;

/// A kind of text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TextForm {
    /// The first characters.
    pub(crate) prefix: &'static str,
    /// The name of the kind in errors.
    pub(crate) name: &'static str,
    /// Maximum size of the binary form in bytes.
    pub(crate) max_bytes: usize,
}

impl TextForm {
    /// Writes the text of this binary form.
    pub(crate) fn write(&self, bytes: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.prefix, BASE64URL_NOPAD.encode_display(bytes))
    }

    /// Decodes a text to the binary form. `is_cut_off` returns the error for the beginning of a binary form.
    pub(crate) fn decode(
        &self,
        text: &str,
        is_cut_off: impl FnOnce(&[u8]) -> Option<DescriptorError>,
    ) -> Result<Vec<u8>, DescriptorError> {
        // White space in it included. A longer text is not read.
        if text.len() / 2 > self.max_bytes {
            return Err(DescriptorError::TooLarge {
                found: text.len().saturating_sub(self.prefix.len()) / 4 * 3,
            });
        }
        let bare = unquoted(text);
        let joined = joined(bare);
        let encoded = joined.strip_prefix(self.prefix).ok_or_else(|| self.other_text(bare))?.as_bytes();
        let bytes = encoded.len() / 4 * 3;
        if bytes > self.max_bytes {
            return Err(DescriptorError::TooLarge { found: bytes });
        }
        BASE64URL_NOPAD.decode(encoded).map_err(|error| {
            // A text that was cut off within a group of four characters is not Base64.
            let whole = BASE64URL_NOPAD.decode(&encoded[..encoded.len() / 4 * 4]).ok();
            let cut_off = whole.and_then(|whole| is_cut_off(&whole));
            cut_off.unwrap_or_else(|| {
                let position = error.position;
                let found = joined[self.prefix.len()..].get(position..).and_then(|rest| rest.chars().next());
                DescriptorError::BadCharacter { position, found: found.unwrap_or_default() }
            })
        })
    }

    /// Returns the error for a text that does not begin with the prefix.
    fn other_text(&self, text: &str) -> DescriptorError {
        let Self { prefix, name, .. } = *self;
        let found = match text.find(prefix) {
            Some(at) => {
                format!("{} characters before it: {}", text[..at].chars().count(), shown(&text[..at]))
            }
            None if text.is_empty() => "an empty text".to_owned(),
            None => shown(text),
        };
        DescriptorError::NotText { name, prefix, found }
    }
}

/// Returns the text without white space, a byte order mark and quotes around it.
fn unquoted(text: &str) -> &str {
    let is_around = |character: char| character.is_whitespace() || character == '\u{feff}';
    let text = text.trim_matches(is_around);
    let quotes = ['"', '\'', '`'].into_iter();
    let quoted = quotes.filter_map(|quote| text.strip_prefix(quote)?.strip_suffix(quote)).next();
    quoted.map_or(text, |quoted| quoted.trim_matches(is_around))
}

/// Returns the text without white space in it.
fn joined(text: &str) -> Cow<'_, str> {
    if text.contains(char::is_whitespace) {
        Cow::Owned(text.split_whitespace().collect())
    } else {
        Cow::Borrowed(text)
    }
}

/// Returns the beginning of a text for an error.
fn shown(text: &str) -> String {
    let beginning: String = text.chars().take(SHOWN_CHARS).collect();
    let more = if beginning.len() < text.len() { "…" } else { "" };
    format!("{beginning:?}{more}")
}

#[cfg(test)]
mod tests;
