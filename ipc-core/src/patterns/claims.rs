//! The hand-over of a table of claims with a channel.

use std::time::Duration;

use super::channel::Channel;
use crate::model::error::Result;
use crate::sharing::claims::{ClaimTable, Claims};
use crate::transport::Deadline;

impl ClaimTable {
    /// Hands the table over to the peer of a channel, which takes it by [`Claims::receive`]. Returns the number of the importer,
    /// which the caller sends.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`](crate::Error::Unsupported) for more than 46 importers at a time;
    /// [`Error::Io`](crate::Error::Io); [`Error::ChannelClosed`](crate::Error::ChannelClosed) or
    /// [`Error::PeerGone`](crate::Error::PeerGone).
    pub fn admit<const RECEIVES: bool>(&self, channel: &Channel<true, RECEIVES>) -> Result<u32> {
        let importer = self.number()?;
        match channel.send_file(self.file()) {
            Ok(()) => Ok(importer),
            Err(error) => {
                self.dismiss(importer);
                Err(error)
            }
        }
    }
}

impl Claims {
    /// Takes the table that the peer of a channel has handed over, by [`ClaimTable::admit`], as the importer of this number.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`](crate::Error::Timeout); [`Error::Protocol`](crate::Error::Protocol) if the peer sends something
    /// else; [`Error::ChannelClosed`](crate::Error::ChannelClosed) or [`Error::PeerGone`](crate::Error::PeerGone);
    /// [`Error::Io`](crate::Error::Io).
    pub fn receive<const SENDS: bool>(
        channel: &Channel<SENDS, true>,
        importer: u32,
        timeout: Duration,
    ) -> Result<Self> {
        Self::open(channel.take_file(Deadline::after(timeout))?, importer)
    }
}
