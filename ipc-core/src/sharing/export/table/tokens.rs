//! The tokens of exports and grants, read from the kernel in blocks.

use super::ExportTable;
use crate::model::error::Result;
use crate::wire::{Token, random_bytes};

impl ExportTable {
    /// Returns a token for a new export.
    pub(crate) fn new_token(&self) -> Result<Token> {
        self.lock().tokens.take()
    }
}

/// Unused random tokens: a read from the kernel costs as much as a send.
#[derive(Default)]
pub(super) struct Tokens {
    bytes: Vec<u8>,
}

impl Tokens {
    /// The number of bytes of one read from the kernel.
    const BYTES: usize = 1024;

    pub(super) fn take(&mut self) -> Result<Token> {
        if self.bytes.is_empty() {
            self.bytes.extend(random_bytes::<{ Self::BYTES }>()?);
        }
        let rest = self.bytes.len() - size_of::<Token>();
        let mut token = [0; size_of::<Token>()];
        token.copy_from_slice(&self.bytes[rest..]);
        // The token does not remain in memory.
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
