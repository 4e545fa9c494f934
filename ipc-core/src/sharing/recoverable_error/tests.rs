use std::error::Error as _;

use super::*;

#[test]
fn recoverable_error_has_text_and_source_of_its_error() {
    let end = || Box::new(Error::RingClosed { pid: 7 });
    let error = || Error::RingUnpublished { first: 3, last: 4, source: end() };
    let failed = RecoverableError::new(error(), 5);
    assert_eq!(failed.to_string(), error().to_string());
    assert_eq!(failed.source().map(ToString::to_string), Some(end().to_string()));
    assert_eq!(failed.into_inner(), 5);
}

#[test]
fn question_mark_keeps_the_error_and_drops_the_value() {
    assert!(matches!(Error::from(RecoverableError::new(Error::Forked, 5)), Error::Forked));
}
