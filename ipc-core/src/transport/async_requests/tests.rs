use std::time::Duration;

use super::*;
use crate::model::lease::LeaseId;

fn staging(request: RequestId) -> Reply {
    Reply::Staging { request, lease: LeaseId(1), chunk_bytes: 1 << 16, bytes: 1 }
}

#[test]
fn reply_is_delivered_once_and_to_no_abandoned_request() {
    let mut requests = AsyncRequests::default();
    let ((first, answer), (second, _)) = (requests.begin(), requests.begin());
    assert!(
        AsyncRequests::has_request_of(&staging(first))
            && !AsyncRequests::has_request_of(&staging(RequestId(1)))
    );
    assert!(requests.deliver(staging(first), ReceivedFds::default()).unwrap());
    let waited = answer.wait(Deadline::after(Duration::ZERO));
    assert!(matches!(waited, Some(Outcome::Reply(Reply::Staging { .. }, _))));
    assert!(
        matches!(requests.deliver(staging(first), ReceivedFds::default()), Err(Error::Protocol(_))),
        "twice"
    );
    requests.abandon(second);
    assert!(!requests.deliver(staging(second), ReceivedFds::default()).unwrap());
    assert!(matches!(requests.deliver(staging(second), ReceivedFds::default()), Err(Error::Protocol(_))));
}

#[test]
fn exporter_termination_ends_all_requests() {
    let mut requests = AsyncRequests::default();
    let (_, answer) = requests.begin();
    assert!(answer.wait(Deadline::after(Duration::ZERO)).is_none());
    requests.end();
    assert!(matches!(answer.wait(Deadline::after(Duration::ZERO)), Some(Outcome::ExporterGone)));
}
