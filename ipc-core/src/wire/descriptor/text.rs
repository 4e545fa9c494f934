//! The text form: one line that survives a file, a shell, a URL and an environment variable.

use serde::de::Error as _;

use super::{Descriptor, DescriptorError, MAX_DESCRIPTOR_BYTES};
use crate::wire::text::TextForm;

/// The first characters of the text form; the rest is the binary form in URL-safe Base64 without padding (RFC 4648 §5).
pub const TEXT_PREFIX: &str = "dipc1:";

const FORM: TextForm = TextForm { prefix: TEXT_PREFIX, name: "descriptor", max_bytes: MAX_DESCRIPTOR_BYTES };

impl std::fmt::Display for Descriptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        FORM.write(&self.to_bytes(), f)
    }
}

impl std::str::FromStr for Descriptor {
    type Err = crate::model::error::Error;

    /// Decodes the text form. White space in it and around it, a byte order mark and quotes are ignored.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(parse(text)?)
    }
}

fn parse(text: &str) -> Result<Descriptor, DescriptorError> {
    let bytes = FORM.decode(text, |whole| match Descriptor::from_bytes(whole) {
        Err(truncated @ DescriptorError::Truncated { .. }) => Some(truncated),
        _ => None,
    })?;
    // The prefix is correct, so wrong magic bytes behind it are damage.
    Descriptor::from_bytes(&bytes).map_err(|error| match error {
        DescriptorError::BadMagic => DescriptorError::BadChecksum,
        error => error,
    })
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
