//! Copies through host memory.

use std::time::Duration;

use device_ipc_core::{DeviceOwner, Error, Result, StagingLimits, set_staging_limits};

use super::{Agent, Words};

/// `copy-limits CHUNK TOTAL`: bytes of a chunk, and of all copies at a time.
pub(super) fn limits(words: &Words<'_>) -> Result<String> {
    let limits = StagingLimits { chunk_bytes: words.number(0) as u64, total_bytes: words.number(1) as u64 };
    set_staging_limits(limits)?;
    Ok(String::new())
}

impl Agent {
    /// `copy NAME DESCRIPTOR [timeout=MS]`: a copy on device 0.
    pub(super) fn copy(&mut self, words: &Words<'_>) -> Result<String> {
        let descriptor = words.descriptor(1)?;
        let mut builder = self.ipc().open(&descriptor).staged();
        if let Some(timeout) = words.number_of("timeout") {
            builder = builder.timeout(Duration::from_millis(timeout));
        }
        let mapping = builder.on_device(0)?;
        assert!(mapping.is_copy(), "it was asked for");
        let bytes = mapping.len();
        self.mappings.insert(words.name(0).to_owned(), mapping);
        Ok(bytes.to_string())
    }

    /// `share-borrowed NAME BUFFER`: the memory of a buffer that the export does not keep.
    pub(super) fn share_borrowed(&mut self, words: &Words<'_>) -> Result<String> {
        let region = self.buffers.get(words.name(1)).expect("it was allocated").region();
        // SAFETY: not kept, for tests of what is noticed then; nothing on the mock is harmed by that.
        let export = unsafe { self.ipc().share_borrowed(region) }.start().map_err(Error::from)?;
        let descriptor = export.descriptor().to_string();
        self.exports.insert(words.name(0).to_owned(), export);
        Ok(descriptor)
    }

    /// `pattern NAME`: writes bytes to a mapping, of which neighbours differ.
    pub(super) fn pattern(&mut self, words: &Words<'_>) -> Result<String> {
        let stream = self.stream()?;
        let mapping = self.mappings.get(words.name(0)).expect("it was opened");
        let bytes: Vec<u8> =
            (0..mapping.len() as u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        mapping.view_mut::<u8, _>(&stream)?.copy_from(&bytes)?;
        stream.synchronize()?;
        Ok(String::new())
    }

    /// `sum NAME`: of the bytes of a mapping, each times its place, so that bytes in another order have another one.
    pub(super) fn sum(&mut self, words: &Words<'_>) -> Result<String> {
        let stream = self.stream()?;
        let mapping = self.mappings.get(words.name(0)).expect("it was opened");
        let bytes = mapping.view::<u8, _>(&stream)?.to_vec()?;
        let sum = (1_u64..)
            .zip(&bytes)
            .fold(0_u64, |sum, (place, byte)| sum.wrapping_add(place.wrapping_mul(u64::from(*byte))));
        Ok(format!("{} {sum}", bytes.len()))
    }
}
