//! The text form: one line that survives a file, a shell, a URL and an environment variable.

use std::fmt;
use std::str::FromStr;

use data_encoding::BASE64URL_NOPAD;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Descriptor, DescriptorError, MAX_DESCRIPTOR_BYTES};

/// What the text form begins with; the rest is the binary form in URL-safe Base64 without padding (RFC 4648 §5).
pub const TEXT_PREFIX: &str = "dipc.";

impl fmt::Display for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{TEXT_PREFIX}{}", BASE64URL_NOPAD.encode_display(&self.to_bytes()))
    }
}

impl FromStr for Descriptor {
    type Err = crate::error::Error;

    /// Reads the text form. White space around it is passed over.
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
    let bytes = BASE64URL_NOPAD
        .decode(encoded.as_bytes())
        .map_err(|error| DescriptorError::BadCharacter { position: error.position })?;
    Descriptor::from_bytes(&bytes)
}

impl Serialize for Descriptor {
    /// As text in formats for people, as bytes in others.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(self)
        } else {
            serializer.serialize_bytes(&self.to_bytes())
        }
    }
}

impl<'de> Deserialize<'de> for Descriptor {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
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

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the binary form of a device-ipc descriptor")
    }

    fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<Descriptor, E> {
        Descriptor::from_bytes(bytes).map_err(E::custom)
    }
}
