//! Errors of the vendors' libraries.

/// The status of a vendor's call: a number, because a newer library may return unknown ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VendorStatus(pub i32);

/// A call of a vendor's library that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{call} failed with {name} ({}){}{}",
    .status.0,
    separated(": ", .message),
    separated(". ", .hint)
)]
#[non_exhaustive]
pub struct VendorError {
    /// The backend.
    pub backend: &'static str,
    /// The function's name.
    pub call: &'static str,
    /// The returned status.
    pub status: VendorStatus,
    /// The vendor's name of the status, or `unknown status`.
    pub name: String,
    /// The vendor's last message, or empty.
    pub message: String,
    /// What to do about the error, or empty.
    pub hint: String,
}

impl VendorError {
    /// Creates an error without the vendor's message and without advice.
    pub fn new(
        backend: &'static str,
        call: &'static str,
        status: VendorStatus,
        name: impl Into<String>,
    ) -> Self {
        Self { backend, call, status, name: name.into(), message: String::new(), hint: String::new() }
    }

    /// Sets [`message`](Self::message).
    pub fn with_message(mut self, message: impl Into<String>) -> Self {
        self.message = message.into();
        self
    }

    /// Sets [`hint`](Self::hint).
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = hint.into();
        self
    }
}

fn separated(separator: &str, text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("{separator}{text}") }
}

#[cfg(test)]
mod tests;
