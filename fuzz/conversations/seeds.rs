//! Valid conversations, the seeds of the fuzzer.

use super::Seed;
use super::exporter::{self, token};
use super::importer;
use super::script::Writer;
use crate::backend::{Access, HandleKind};
use crate::model::address::Generation;
use crate::model::lease::{LeaseId, LeaseState};
use crate::wire::descriptor::ExportId;
use crate::wire::examples::SOMEBODY;
use crate::wire::protocol::{
    AllocationId, ListedExport, ListedHolder, OpenedExport, PROTOCOL_VERSION, PageId, Reply, Request,
    RequestId, Span, WireHandle, encode,
};
use crate::wire::{Refusal, Token};

fn hello(protocol: u16) -> Vec<u8> {
    encode(&Request::Hello { protocol, program: "fuzzer".into() }).expect("a seed is short")
}

fn open(export: u64, token: Token, access: Access) -> Vec<u8> {
    open_like(export, token, access, None)
}

fn open_like(export: u64, token: Token, access: Access, like: Option<u64>) -> Vec<u8> {
    open_by(export, token, None, access, like)
}

fn open_by(export: u64, token: Token, grant: Option<Token>, access: Access, like: Option<u64>) -> Vec<u8> {
    let (request, export, like) = (RequestId(5), ExportId(export), like.map(LeaseId));
    encode(&Request::Open { request, export, token, grant, access, on: 0, peer: Vec::new(), like })
        .expect("a seed is short")
}

fn release(lease: u64) -> Vec<u8> {
    encode(&Request::release_unused(LeaseId(lease))).expect("a seed is short")
}

fn confirm(lease: u64) -> Vec<u8> {
    encode(&Request::Confirm { request: RequestId(6), lease: LeaseId(lease) }).expect("a seed is short")
}

fn grant_of(lease: u64) -> Vec<u8> {
    let (request, lease) = (RequestId(8), LeaseId(lease));
    encode(&Request::Grant { request, lease, limit_ms: 60_000 }).expect("a seed is short")
}

fn claims_of(lease: u64) -> Vec<u8> {
    let (request, lease) = (RequestId(8), LeaseId(lease));
    encode(&Request::Claims { request, lease }).expect("a seed is short")
}

fn timeline(lease: u64, ready: bool) -> Vec<u8> {
    let request = RequestId(7);
    encode(&Request::Timeline { request, lease: LeaseId(lease), ready }).expect("a seed is short")
}

fn stage(export: u64, token: Token) -> Vec<u8> {
    stage_spans(export, token, &[])
}

fn stage_spans(export: u64, token: Token, spans: &[(u32, u64, u64)]) -> Vec<u8> {
    let (request, export) = (RequestId(1 << 63 | 1), ExportId(export));
    let spans = spans.iter().map(|&(region, offset, len)| Span { region, offset, len }).collect();
    encode(&Request::Stage { request, export, token, grant: None, spans }).expect("a seed is short")
}

fn stage_next(lease: u64, chunk: u64) -> Vec<u8> {
    let (request, lease) = (RequestId(1 << 63 | 2), LeaseId(lease));
    encode(&Request::StageNext { request, lease, chunk }).expect("a seed is short")
}

fn list() -> Vec<u8> {
    encode(&Request::List { request: RequestId(9), after: ExportId(0) }).expect("a seed is short")
}

/// A conversation in which the importer sends these packets, with their repetitions.
fn importers(stranger: bool, packets: &[(usize, Vec<u8>)]) -> Vec<u8> {
    let mut script = Writer(vec![u8::from(stranger)]);
    for (times, packet) in packets {
        script.step(exporter::SEND, *times, packet);
    }
    script.0
}

/// Returns the seeds of [`Exporter::serve`](super::Exporter::serve).
pub fn request_seeds() -> Vec<Seed> {
    let (right, wrong) = (token, Token::from_bytes([0x55; 16]));
    let (read, write) = (Access::ReadOnly, Access::ReadWrite);
    let first = (1, hello(PROTOCOL_VERSION));
    let mut everything = Writer(vec![0]);
    everything.step(exporter::SEND, 1, &hello(PROTOCOL_VERSION));
    everything.step(exporter::SEND, 2, &open(1, right(1), write));
    everything.step(exporter::READ_ANSWERS, 1, &[]);
    everything.step(exporter::SEND, 1, &confirm(1));
    everything.step(exporter::DROP_EXPORT, 1, &[0]);
    everything.step(exporter::SEND, 1, &confirm(1));
    everything.step(exporter::SEND, 1, &open(1, right(1), read));
    everything.step(exporter::SEND, 1, &list());
    everything.step(exporter::SEND, 1, &grant_of(1));
    everything.step(exporter::SEND, 1, &grant_of(2));
    everything.step(exporter::SEND, 1, &grant_of(9));
    everything.step(exporter::SEND, 1, &claims_of(1));
    everything.step(exporter::SEND, 1, &claims_of(9));
    everything.step(exporter::SEND, 1, &release(2));
    everything.step(exporter::SEND, 1, &release(1));
    let mut with_descriptors = Writer(importers(false, std::slice::from_ref(&first)));
    with_descriptors.step(exporter::SEND_WITH_DESCRIPTORS, 1, &open(1, right(1), read));
    let grants = [first.clone(), (1100, open(2, right(2), read)), (1, release(7)), (1, release(7))];
    vec![
        ("hello", importers(false, std::slice::from_ref(&first))),
        ("descriptors-with-a-request", with_descriptors.0),
        ("hello-of-another-version", importers(false, &[(1, hello(2))])),
        ("hello-twice", importers(false, &[first.clone(), first.clone()])),
        ("open", importers(false, &[first.clone(), (1, open(1, right(1), write)), (1, release(1))])),
        (
            "open-by-an-unknown-grant",
            importers(false, &[first.clone(), (1, open_by(1, right(1), Some(wrong), write, None))]),
        ),
        ("open-unknown", importers(false, &[first.clone(), (1, open(9, right(9), read))])),
        ("open-for-writing", importers(false, &[first.clone(), (1, open(2, right(2), write))])),
        (
            "open-as-a-stranger",
            importers(
                true,
                &[first.clone(), (1, open(1, right(1), read)), (1, open(3, right(3), write)), (1, list())],
            ),
        ),
        (
            "open-like-another",
            importers(
                false,
                &[
                    first.clone(),
                    (1, open(1, right(1), read)),
                    (1, open_like(2, right(2), read, Some(1))),
                    (1, open_like(2, right(2), read, Some(9))),
                    (1, release(1)),
                    (1, open_like(1, right(1), read, Some(1))),
                    (1, open_like(1, wrong, read, Some(2))),
                    (1, stage(1, right(1))),
                    (1, open_like(2, right(2), read, Some(5))),
                ],
            ),
        ),
        ("guess-tokens", importers(false, &[first.clone(), (17, open(1, wrong, read))])),
        ("read-nothing", importers(false, &grants)),
        ("list", importers(false, &[first.clone(), (1, list())])),
        (
            "timeline",
            importers(
                false,
                &[
                    first.clone(),
                    (1, open(1, right(1), write)),
                    (2, timeline(1, true)),
                    (1, timeline(9, false)),
                ],
            ),
        ),
        (
            "stage",
            importers(
                false,
                &[
                    first.clone(),
                    (2, stage(2, right(2))),
                    (1, stage(1, wrong)),
                    (1, release(1)),
                    (1, stage_next(2, 0)),
                ],
            ),
        ),
        (
            "stage-spans",
            importers(
                false,
                &[
                    first.clone(),
                    (1, stage_spans(1, right(1), &[(0, 0, 16), (0, 16, 1), (0, 100, 20)])),
                    (1, stage_spans(1, right(1), &[(0, 0, 16), (0, 15, 1)])),
                    (1, stage_spans(1, right(1), &[(1, 0, 16)])),
                    (1, stage_spans(1, right(1), &[(0, 0, 0)])),
                    (1, stage_spans(1, right(1), &[(0, u64::MAX, u64::MAX)])),
                ],
            ),
        ),
        ("release-twice", importers(false, &[first, (1, open(1, right(1), read)), (2, release(1))])),
        ("everything", everything.0),
    ]
}

fn reply(reply: &Reply) -> Vec<u8> {
    encode(reply).expect("a seed is short")
}

fn handle(allocation: u64, fds: u16) -> WireHandle {
    WireHandle {
        allocation: AllocationId(allocation),
        kind: HandleKind(2),
        bytes: crate::backend::HandleBytes::new([0x66; 24]),
        fds,
        size: 1 << 20,
        generation: Some(Generation(3)),
    }
}

fn handles(request: u64, fds: u16) -> Vec<u8> {
    reply(&Reply::Handles { request: RequestId(request), handles: vec![handle(1, fds), handle(2, fds)] })
}

fn grant(request: u64, fds: u16) -> Vec<u8> {
    let handles = vec![handle(1, fds), handle(2, fds)];
    let (request, lease) = (RequestId(request), LeaseId(8));
    reply(&Reply::Opened(OpenedExport {
        request,
        lease,
        handles,
        ready: Some(crate::backend::HandleBytes::new([0x77; 32])),
        keep: false,
        confirm: false,
        like: false,
        slot: Some(0),
        ahead: Vec::new(),
    }))
}

/// A conversation in which the exporter sends these packets.
fn exporters(mode: u8, packets: &[Vec<u8>]) -> Vec<u8> {
    let mut script = Writer(vec![mode]);
    for packet in packets {
        script.step(importer::SEND, 1, packet);
    }
    script.0
}

/// Returns the seeds of [`Importer::open`](super::Importer::open).
pub fn reply_seeds() -> Vec<Seed> {
    let refused = |request, refusal| reply(&Reply::Refused { request: RequestId(request), refusal });
    let notices =
        [reply(&Reply::Dropped { export: ExportId(1) }), reply(&Reply::Recall { export: ExportId(1) })];
    let holder = ListedHolder { pid: 12, program: "train".into(), held_ms: 5000, state: LeaseState::Idle };
    let listed = ListedExport {
        export: ExportId(1),
        backend: "mock".into(),
        bytes: 4096,
        age_ms: 6000,
        opened: 2,
        dropped: false,
        holders: vec![holder],
        held_by: 1,
        idle: 1,
    };
    let listing = Reply::Listing { request: RequestId(1), exports: vec![listed], more: true };
    let hello = |protocol| reply(&Reply::Hello { protocol, exporter: SOMEBODY });
    let mut with_descriptors = Writer(vec![0]);
    with_descriptors.step(importer::SEND_WITH_DESCRIPTORS, 1, &grant(1, 1));
    let words = reply(&Reply::Timeline { request: RequestId(1), page: PageId(0), slot: 3, base: 0 });
    let chunk = Reply::Staged { request: RequestId(1 << 63 | 1), chunk: 0, bytes: 4096 };
    let [dropped, recall] = notices.clone();
    vec![
        ("grant", exporters(0, &[grant(1, 0)])),
        ("grant-with-descriptors", with_descriptors.0),
        ("grant-in-two-packets", exporters(0, &[handles(1, 0), grant(1, 0)])),
        ("handles-of-another-request", exporters(0, &[handles(3, 0), grant(1, 0)])),
        ("timeline-that-nobody-asked-for", exporters(0, &[words])),
        ("chunk-that-nobody-asked-for", exporters(0, &[reply(&chunk)])),
        ("grant-after-notices", exporters(0, &[dropped, recall, grant(1, 0)])),
        ("notices-after-the-grant", exporters(0, &[&[grant(1, 0)][..], &notices].concat())),
        ("grant-that-comes-late", exporters(importer::GIVE_UP_FIRST, &[grant(1, 0), grant(2, 0)])),
        (
            "refusal-that-comes-late",
            exporters(importer::GIVE_UP_FIRST, &[refused(1, Refusal::Dropped), grant(2, 0)]),
        ),
        ("grant-that-nobody-asked-for", exporters(0, &[grant(77, 0)])),
        ("granted", exporters(0, &[reply(&Reply::Granted { request: RequestId(1), token: token(1) })])),
        ("confirmed", exporters(0, &[reply(&Reply::Confirmed { request: RequestId(1) })])),
        ("refused-dropped", exporters(0, &[refused(1, Refusal::Dropped)])),
        ("refused-user", exporters(0, &[refused(1, Refusal::UserNotAllowed { uid: 1000 })])),
        ("refused-access", exporters(0, &[refused(1, Refusal::Access { granted: Access::ReadOnly })])),
        ("refused-stale", exporters(0, &[refused(1, Refusal::Stale { detail: "freed".into() })])),
        ("listing", exporters(0, &[reply(&listing)])),
        ("hello-twice", exporters(0, &[hello(PROTOCOL_VERSION)])),
        ("own-hello", exporters(importer::OWN_HELLO, &[hello(PROTOCOL_VERSION), grant(1, 0)])),
        ("hello-of-another-version", exporters(importer::OWN_HELLO, &[hello(2)])),
    ]
}
