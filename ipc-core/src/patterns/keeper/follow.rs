//! Mappings that follow their keeper to newer versions, at addresses that stay.

use super::Search;
use crate::backend::stream::{AsStream, BorrowedStream};
use crate::model::error::Result;
use crate::sharing::import::Mapping;
use crate::transport::Deadline;

/// Mappings of a [`KeeperExport`](crate::KeeperExport) that was opened with [`OpenBuilder::reserved`](crate::OpenBuilder::reserved).
impl Mapping {
    /// Exchanges the memory for the keeper's present export, at the same addresses, as [`replace`](Self::replace) does. Returns the
    /// keeper's version of it, or `None` if the mapping has that export already.
    ///
    /// Without a change since the last call, this reads shared memory, and costs neither a message nor a system call: an engine can
    /// call it between two steps. Callbacks for the notification of a new version ([`on_dropped`](Self::on_dropped)) belong to
    /// one export, so register them again afterwards.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # fn main() -> device_ipc_core::Result<()> {
    /// # let ipc: device_ipc_core::Ipc = unimplemented!();
    /// # let stream = ipc.create_stream(0)?;
    /// let kept = ipc.find("keeper:llama", std::time::Duration::from_secs(30))?;
    /// let mut weights = kept.open().reserved().on(&stream)?;
    /// loop {
    ///     if let Some(version) = weights.follow_on(&stream)? {
    ///         println!("version {version}, at the same addresses");
    ///     }
    ///     // … a step, such as the launch of a captured graph …
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The memory, its addresses and the lease stay as they are: [`Error::NoListener`](crate::Error::NoListener), without waiting, if
    /// the keeper has terminated or no longer has the name; [`LayoutError::Differs`](crate::LayoutError::Differs);
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a mapping of no keeper or without reserved addresses;
    /// [`Error::Suspended`](crate::Error::Suspended), for [`resume`](Self::resume) with the keeper's answer instead; as for
    /// [`Ipc::find`](crate::Ipc::find) and [`replace`](Self::replace).
    pub fn follow(&mut self) -> Result<Option<u64>> {
        self.follow_after(None)
    }

    /// Exchanges the memory as [`follow`](Self::follow) does, after the work that was submitted to `stream` so far; see
    /// [`replace_on`](Self::replace_on).
    ///
    /// # Errors
    ///
    /// As for [`follow`](Self::follow) and [`replace_on`](Self::replace_on).
    pub fn follow_on<M>(&mut self, stream: &impl AsStream<M>) -> Result<Option<u64>> {
        self.follow_after(Some(stream.as_stream()))
    }

    fn follow_after(&mut self, stream: Option<BorrowedStream<'_>>) -> Result<Option<u64>> {
        let Some(search) = self.search_keeper()? else { return Ok(None) };
        let deadline = Deadline::after(search.timeout);
        let kept = Search::again(&search.ipc, &search.keeper, search.timeout).run()?;
        let [found, known] = [kept.descriptor(), self.descriptor()].map(|of| (of.exporter(), of.export()));
        let has_it = found == known;
        if !has_it {
            self.replace_after(kept.open().timeout(deadline.left()).into(), stream)?;
        }
        let version = kept.version();
        // The answer refers to the search.
        drop(kept);
        self.note_current(search);
        Ok((!has_it).then_some(version))
    }
}
