//! The rows of the report, one file each.

mod channel_tcp;
mod copy_peer;
mod device_map;
mod export;
mod first_open;
mod hand_over;
mod many;
mod open_again;
mod pull;
mod raw_words;
mod ready_acknowledge;
mod replace;
mod ring;
mod start;
mod state_dict;
mod weights;

use crate::frame::Row;

/// All rows, in the order of execution and of the report.
pub(super) const ROWS: &[Row] = &[
    export::ROW,
    first_open::ROW,
    open_again::ROW,
    replace::ROW,
    hand_over::ROW,
    channel_tcp::ROW,
    ready_acknowledge::ROW,
    copy_peer::ROW,
    device_map::ROW,
    start::ROW,
    many::ROW,
    state_dict::ROW,
    ring::ROW,
    weights::ROW,
    pull::ROW,
];
