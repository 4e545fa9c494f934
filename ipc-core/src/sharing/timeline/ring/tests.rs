use super::*;
use Publication::{Closed, Ending, Pending, Published, WriterGone};
use Seen::{Ended, Live};

fn of_sequence_3(seen: Seen, total: Option<u64>) -> Publication {
    Publication::of(3, seen, total)
}

#[test]
fn publication_in_open_ring_follows_counter() {
    assert_eq!(of_sequence_3(Live(0), None), Pending);
    assert_eq!(of_sequence_3(Live(3), None), Pending);
    assert_eq!(of_sequence_3(Live(4), None), Published);
    assert_eq!(of_sequence_3(Live(TIMELINE_END - 1), None), Published);
}

#[test]
fn publication_is_undecided_while_termination_is_unknown() {
    assert_eq!(of_sequence_3(Live(TIMELINE_END), None), Ending);
    assert_eq!(of_sequence_3(Live(TIMELINE_END + 1), None), Ending);
}

#[test]
fn publication_in_closed_ring_is_below_total() {
    // Publications below the total may not have arrived yet.
    assert_eq!(of_sequence_3(Live(3), Some(4)), Pending);
    assert_eq!(of_sequence_3(Live(4), Some(4)), Published);
    assert_eq!(of_sequence_3(Live(0), Some(3)), Closed);
    for seen in [Live(TIMELINE_END), Ended(TIMELINE_END)] {
        assert_eq!(of_sequence_3(seen, Some(4)), Published);
        assert_eq!(of_sequence_3(seen, Some(3)), Closed);
    }
}

#[test]
fn publication_after_writer_death_requires_arrival() {
    for total in [None, Some(4), Some(5)] {
        assert_eq!(of_sequence_3(Ended(4), total), Published);
        assert_eq!(of_sequence_3(Ended(3), total), WriterGone);
    }
    // Some publications before the close had not arrived, so the writer's death ended the ring.
    assert_eq!(of_sequence_3(Ended(2), Some(3)), WriterGone);
    assert_eq!(of_sequence_3(Ended(TIMELINE_END), None), WriterGone);
}
