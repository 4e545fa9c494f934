//! Bytes as text in JSON: without optimization, arrays of numbers take a fifth of the suite's time.

use data_encoding::BASE64;
use serde::{Deserialize, Deserializer, Serializer};

pub(super) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&text(bytes))
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    bytes(&String::deserialize(deserializer)?)
}

/// For bytes that may be left out.
pub(super) mod optional {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[expect(clippy::ref_option, reason = "serde passes a reference to the field")]
    pub(in crate::agent) fn serialize<S: Serializer>(
        bytes: &Option<Vec<u8>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        bytes.as_deref().map(super::text).serialize(serializer)
    }

    pub(in crate::agent) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Vec<u8>>, D::Error> {
        Option::<String>::deserialize(deserializer)?.map(|text| super::bytes(&text)).transpose()
    }
}

fn text(bytes: &[u8]) -> String {
    BASE64.encode(bytes)
}

fn bytes<E: serde::de::Error>(text: &str) -> Result<Vec<u8>, E> {
    BASE64.decode(text.as_bytes()).map_err(E::custom)
}
