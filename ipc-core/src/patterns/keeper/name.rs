//! Names of keepers.

use std::fmt;

use crate::model::error::{Error, Result};

/// The prefix of the channel name of a keeper.
pub(super) const PREFIX: &str = "keeper.";

/// The optional prefix of a keeper's name that is used instead of a descriptor.
const SCHEME: &str = "keeper:";

/// Maximum length of a name in bytes: a channel name has at most 64, and programs may need one of their own for each keeper.
const MAX_NAME_BYTES: usize = 48;

/// Returns the channel name of the keeper of this name.
pub(super) fn channel_name(name: &str) -> Result<String> {
    let invalid = |why: &str| Error::invalid_input(format!("channel name {name:?}"), why);
    if name.is_empty() {
        return Err(invalid("the name of a keeper is empty"));
    }
    if name.len() > MAX_NAME_BYTES {
        return Err(invalid("the name of a keeper is longer than 48 B"));
    }
    if name.contains('/') {
        return Err(invalid("before the '/' stands the number of a user, as in keeper:1000/llama"));
    }
    Ok(format!("{PREFIX}{name}"))
}

/// Splits `llama`, `keeper:llama` or `keeper:1000/llama` into the user and the name.
pub(super) fn parse(text: &str) -> (Option<u32>, &str) {
    let text = text.strip_prefix(SCHEME).unwrap_or(text);
    match text.split_once('/').map(|(user, name)| (user.parse(), name)) {
        Some((Ok(user), name)) => (Some(user), name),
        _ => (None, text),
    }
}

/// Writes the form that [`parse`] reads.
pub(super) fn write(f: &mut fmt::Formatter<'_>, user: u32, name: &str) -> fmt::Result {
    write!(f, "{SCHEME}{user}/{name}")
}

#[cfg(test)]
mod tests;
