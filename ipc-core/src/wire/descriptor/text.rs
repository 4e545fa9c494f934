//! The text form: one line that survives a file, a shell, a URL and an environment variable.

use super::{Descriptor, DescriptorError, MAX_DESCRIPTOR_BYTES};

/// What the text form begins with; the rest is the binary form in URL-safe Base64 without padding (RFC 4648 §5).
pub const TEXT_PREFIX: &str = "dipc.";

/// `Display`, `FromStr` and serde's traits for a type that has a binary form: as text in formats for people, as bytes in
/// others.
macro_rules! text_and_serde {
    ($type:ty, prefix: $prefix:expr, most_bytes: $most:expr, otherwise: $otherwise:expr, called: $called:literal) => {
        const _: () = {
            use data_encoding::BASE64URL_NOPAD;
            use serde::de::Error as _;

            impl std::fmt::Display for $type {
                fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    write!(f, "{}{}", $prefix, BASE64URL_NOPAD.encode_display(&self.to_bytes()))
                }
            }

            impl std::str::FromStr for $type {
                type Err = crate::model::error::Error;

                /// Reads the text form. White space around it is passed over.
                fn from_str(text: &str) -> Result<Self, Self::Err> {
                    Ok(parse(text)?)
                }
            }

            fn parse(text: &str) -> Result<$type, DescriptorError> {
                let encoded = text.trim().strip_prefix($prefix).ok_or($otherwise)?;
                let bytes = encoded.len() / 4 * 3;
                if bytes > $most {
                    return Err(DescriptorError::TooLarge { found: bytes });
                }
                let bytes = BASE64URL_NOPAD.decode(encoded.as_bytes());
                let bytes = bytes.map_err(|error| cut_off(encoded, error))?;
                <$type>::from_bytes(&bytes)
            }

            /// Why a text cannot be decoded: the rest of one that was cut off within a group of characters is no Base64.
            fn cut_off(encoded: &str, error: data_encoding::DecodeError) -> DescriptorError {
                let whole = &encoded.as_bytes()[..encoded.len() / 4 * 4];
                match BASE64URL_NOPAD.decode(whole).map(|bytes| <$type>::from_bytes(&bytes)) {
                    Ok(Err(truncated @ DescriptorError::Truncated { .. })) => truncated,
                    _ => DescriptorError::BadCharacter { position: error.position },
                }
            }

            impl serde::Serialize for $type {
                /// As text in formats for people, as bytes in others.
                fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                    if serializer.is_human_readable() {
                        serializer.collect_str(self)
                    } else {
                        serializer.serialize_bytes(&self.to_bytes())
                    }
                }
            }

            impl<'de> serde::Deserialize<'de> for $type {
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
                type Value = $type;

                fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    f.write_str(concat!("the binary form of ", $called))
                }

                fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<$type, E> {
                    <$type>::from_bytes(bytes).map_err(E::custom)
                }
            }
        };
    };
}

pub(crate) use text_and_serde;

text_and_serde!(
    Descriptor,
    prefix: TEXT_PREFIX,
    most_bytes: MAX_DESCRIPTOR_BYTES,
    otherwise: DescriptorError::NotText,
    called: "a device-ipc descriptor"
);
