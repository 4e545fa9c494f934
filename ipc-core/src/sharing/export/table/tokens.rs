//! The secrets of exports and grants, of which the kernel is asked for many at a time.

use super::ExportTable;
use crate::model::error::Result;
use crate::wire::{Token, random_bytes};

impl ExportTable {
    /// A token for a new export.
    pub(crate) fn new_token(&self) -> Result<Token> {
        self.lock().tokens.take()
    }
}

/// Random tokens that nobody has been given: asking the kernel costs as much as sending.
#[derive(Default)]
pub(super) struct Tokens {
    bytes: Vec<u8>,
}

impl Tokens {
    /// The kernel is asked for so many bytes at a time.
    const BYTES: usize = 1024;

    pub(super) fn take(&mut self) -> Result<Token> {
        if self.bytes.is_empty() {
            self.bytes.extend(random_bytes::<{ Self::BYTES }>()?);
        }
        let rest = self.bytes.len() - size_of::<Token>();
        let mut token = [0; size_of::<Token>()];
        token.copy_from_slice(&self.bytes[rest..]);
        // Nothing of it stays behind.
        self.bytes[rest..].fill(0);
        self.bytes.truncate(rest);
        Ok(Token::from_bytes(token))
    }
}

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tokens(not shown)")
    }
}
