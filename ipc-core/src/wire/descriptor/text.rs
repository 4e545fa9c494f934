//! The text form: one line that survives a file, a shell, a URL and an environment variable.

use data_encoding::BASE64URL_NOPAD;
use serde::de::Error as _;

use super::{Descriptor, DescriptorError, MAX_DESCRIPTOR_BYTES};

/// The first characters of the text form; the rest is the binary form in URL-safe Base64 without padding (RFC 4648 §5).
pub const TEXT_PREFIX: &str = "dipc1:";

impl std::fmt::Display for Descriptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{TEXT_PREFIX}{}", BASE64URL_NOPAD.encode_display(&self.to_bytes()))
    }
}

impl std::str::FromStr for Descriptor {
    type Err = crate::model::error::Error;

    /// Decodes the text form. White space around it is ignored.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(parse(text)?)
    }
}

fn parse(text: &str) -> Result<Descriptor, DescriptorError> {
    let encoded = text.trim().strip_prefix(TEXT_PREFIX).ok_or(DescriptorError::NotText)?;
    let bytes = encoded.len() / 4 * 3;
    if bytes > MAX_DESCRIPTOR_BYTES {
        return Err(DescriptorError::TooLarge { found: bytes });
    }
    let bytes = BASE64URL_NOPAD.decode(encoded.as_bytes());
    let bytes = bytes.map_err(|error| cut_off(encoded, error))?;
    // The prefix is correct, so wrong magic bytes behind it are damage.
    Descriptor::from_bytes(&bytes).map_err(|error| match error {
        DescriptorError::BadMagic => DescriptorError::BadChecksum,
        error => error,
    })
}

/// Explains a decoding error: a text that was cut off within a group of four characters is not Base64.
fn cut_off(encoded: &str, error: data_encoding::DecodeError) -> DescriptorError {
    let whole = &encoded.as_bytes()[..encoded.len() / 4 * 4];
    match BASE64URL_NOPAD.decode(whole).map(|bytes| Descriptor::from_bytes(&bytes)) {
        Ok(Err(truncated @ DescriptorError::Truncated { .. })) => truncated,
        _ => DescriptorError::BadCharacter { position: error.position },
    }
}

impl serde::Serialize for Descriptor {
    /// Serialised as text in formats for people, and as bytes in others.
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(self)
        } else {
            serializer.serialize_bytes(&self.to_bytes())
        }
    }
}

impl<'de> serde::Deserialize<'de> for Descriptor {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
            parse(&text).map_err(D::Error::custom)
        } else {
            deserializer.deserialize_byte_buf(Bytes)
        }
    }
}

struct Bytes;

impl serde::de::Visitor<'_> for Bytes {
    type Value = Descriptor;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the binary form of a device-ipc descriptor")
    }

    fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<Descriptor, E> {
        Descriptor::from_bytes(bytes).map_err(E::custom)
    }
}
