//! Properties of all messages of the protocol, tested with arbitrary messages.

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::protocol::{
    AllocationId, ListedExport, ListedHolder, OpenedExport, PageId, Reply, Request, RequestId, Span,
    WireHandle, decode, encode,
};
use super::{Failure, Refusal, Token};
use crate::backend::{Access, HandleBytes, HandleKind};
use crate::model::address::Generation;
use crate::model::lease::{LeaseId, LeaseState};
use crate::sharing::timeline::Returned;
use crate::wire::LeaseAhead;
use crate::wire::descriptor::ExportId;
use crate::wire::descriptor::arbitrary::identity;

fn returned() -> impl Strategy<Value = Returned> {
    any::<(u64, u64, u64)>().prop_map(|(awaited, signalled, seen)| Returned { awaited, signalled, seen })
}

fn access() -> impl Strategy<Value = Access> {
    prop_oneof![Just(Access::ReadOnly), Just(Access::ReadWrite)]
}

fn request() -> impl Strategy<Value = Request> {
    let open = (
        any::<(u64, u64, [u8; 16], Option<[u8; 16]>, u32, Option<u64>)>(),
        access(),
        vec(any::<u8>(), 0..40),
    )
        .prop_map(|((request, export, token, grant, on, like), access, peer)| Request::Open {
            request: RequestId(request),
            export: ExportId(export),
            token: Token::from_bytes(token),
            grant: grant.map(Token::from_bytes),
            access,
            on,
            peer,
            like: like.map(LeaseId),
        });
    prop_oneof![
        (any::<u16>(), ".{0,40}").prop_map(|(protocol, program)| Request::Hello { protocol, program }),
        open,
        (any::<u64>(), option::of(returned()), vec((any::<u64>().prop_map(LeaseId), returned()), 0..3))
            .prop_map(|(lease, words, late)| Request::Release { lease: LeaseId(lease), words, late }),
        any::<(u64, u64)>().prop_map(|(request, lease)| Request::Confirm {
            request: RequestId(request),
            lease: LeaseId(lease)
        }),
        any::<(u64, u64, bool)>().prop_map(|(request, lease, ready)| Request::Timeline {
            request: RequestId(request),
            lease: LeaseId(lease),
            ready
        }),
        (any::<(u64, u64)>(), any::<([u8; 16], Option<[u8; 16]>)>(), vec(any::<(u32, u64, u64)>(), 0..5))
            .prop_map(|((request, export), (token, grant), spans)| Request::Stage {
                request: RequestId(request),
                export: ExportId(export),
                token: Token::from_bytes(token),
                grant: grant.map(Token::from_bytes),
                spans: spans.into_iter().map(|(region, offset, len)| Span { region, offset, len }).collect(),
            }),
        any::<u64>().prop_map(|lease| Request::LeaseChanged { lease: LeaseId(lease) }),
        any::<(u64, u64, u64)>().prop_map(|(request, lease, limit_ms)| Request::Grant {
            request: RequestId(request),
            lease: LeaseId(lease),
            limit_ms
        }),
        any::<(u64, u64)>().prop_map(|(request, lease)| Request::Claims {
            request: RequestId(request),
            lease: LeaseId(lease)
        }),
        any::<(u64, u64, u64)>().prop_map(|(request, lease, chunk)| Request::StageNext {
            request: RequestId(request),
            lease: LeaseId(lease),
            chunk
        }),
        any::<(u64, u64)>().prop_map(|(request, after)| Request::List {
            request: RequestId(request),
            after: ExportId(after)
        }),
        Just(()).prop_map(|()| Request::Exit),
        vec(any::<(u64, [u8; 16])>(), 0..70).prop_map(|grants| Request::EndGrants {
            grants: grants
                .into_iter()
                .map(|(export, token)| (ExportId(export), Token::from_bytes(token)))
                .collect()
        }),
    ]
}

fn handle() -> impl Strategy<Value = WireHandle> {
    let numbers = any::<(u64, u16, u16, u64)>();
    (numbers, vec(any::<u8>(), 0..80), option::of(any::<u64>())).prop_map(
        |((allocation, kind, fds, size), bytes, generation)| WireHandle {
            allocation: AllocationId(allocation),
            kind: HandleKind(kind),
            bytes: crate::backend::HandleBytes::new(bytes),
            fds,
            size,
            generation: generation.map(Generation),
        },
    )
}

fn refusal() -> impl Strategy<Value = Refusal> {
    prop_oneof![
        Just(()).prop_map(|()| Refusal::Dropped),
        Just(()).prop_map(|()| Refusal::WrongToken),
        any::<u32>().prop_map(|uid| Refusal::UserNotAllowed { uid }),
        access().prop_map(|granted| Refusal::Access { granted }),
        ".{0,40}".prop_map(|detail| Refusal::Stale { detail }),
        (any::<u8>(), ".{0,40}")
            .prop_map(|(kind, detail)| Refusal::Failed(Failure { kind: kind.into(), detail })),
    ]
}

fn listed() -> impl Strategy<Value = ListedExport> {
    let holder = (any::<u32>(), ".{0,20}", any::<u64>()).prop_map(|(pid, program, held_ms)| ListedHolder {
        pid,
        program,
        held_ms,
        state: if held_ms % 2 == 0 { LeaseState::Idle } else { LeaseState::InUse },
    });
    (any::<(u64, u64, u64, u64, bool, u64)>(), "[a-z]{1,8}", vec(holder, 0..4)).prop_map(
        |((export, bytes, age_ms, opened, dropped, held_by), backend, holders)| ListedExport {
            export: ExportId(export),
            backend,
            bytes,
            age_ms,
            opened,
            dropped,
            holders,
            held_by,
            idle: held_by / 2,
        },
    )
}

fn reply() -> impl Strategy<Value = Reply> {
    let hello =
        (any::<u16>(), identity()).prop_map(|(protocol, exporter)| Reply::Hello { protocol, exporter });
    let ready = option::of(vec(any::<u8>(), 0..70));
    let grant = (any::<(u64, u64, bool, bool)>(), vec(handle(), 0..4), ready).prop_map(
        |((request, lease, keep, like), handles, ready)| {
            Reply::Opened(OpenedExport {
                request: RequestId(request),
                lease: LeaseId(lease),
                handles,
                ready: ready.map(crate::backend::HandleBytes::new),
                keep,
                confirm: false,
                like,
                slot: (lease % 2 == 0).then_some(lease as u32),
                ahead: Vec::new(),
            })
        },
    );
    let lease =
        (any::<(u64, [u8; 16], u64, u32)>(), option::of(vec(any::<u8>(), 0..70)), option::of(handle()));
    let lease = lease.prop_map(|((export, token, lease, slot), ready, handle)| LeaseAhead {
        export: ExportId(export),
        token: Token::from_bytes(token),
        lease: LeaseId(lease),
        slot,
        ready: ready.map(crate::backend::HandleBytes::new),
        handle,
    });
    let ahead = (any::<u64>(), vec(lease, 0..4))
        .prop_map(|(request, leases)| Reply::Ahead { request: RequestId(request), leases });
    prop_oneof![
        hello,
        grant,
        ahead,
        (any::<u64>(), refusal())
            .prop_map(|(request, refusal)| Reply::Refused { request: RequestId(request), refusal }),
        any::<u64>().prop_map(|export| Reply::Dropped { export: ExportId(export) }),
        any::<u64>().prop_map(|export| Reply::Recall { export: ExportId(export) }),
        (any::<u64>(), vec(handle(), 0..5))
            .prop_map(|(request, handles)| Reply::Handles { request: RequestId(request), handles }),
        any::<(u64, u32, u32, u64)>().prop_map(|(request, page, slot, base)| Reply::Timeline {
            request: RequestId(request),
            page: PageId(page),
            slot,
            base
        }),
        any::<(u64, u64, u64, u64)>().prop_map(|(request, lease, chunk_bytes, bytes)| Reply::Staging {
            request: RequestId(request),
            lease: LeaseId(lease),
            chunk_bytes,
            bytes
        }),
        any::<(u64, u64, u64)>().prop_map(|(request, chunk, bytes)| Reply::Staged {
            request: RequestId(request),
            chunk,
            bytes
        }),
        any::<u64>().prop_map(|request| Reply::Confirmed { request: RequestId(request) }),
        any::<(u64, [u8; 16])>().prop_map(|(request, token)| Reply::Granted {
            request: RequestId(request),
            token: Token::from_bytes(token)
        }),
        any::<(u64, u32)>()
            .prop_map(|(request, importer)| Reply::Claims { request: RequestId(request), importer }),
        (any::<(u64, bool)>(), vec(listed(), 0..4)).prop_map(|((request, more), exports)| {
            Reply::Listing { request: RequestId(request), exports, more }
        }),
    ]
}

/// Messages have no equality: equal `Debug` text and equal bytes stand for it.
fn check_message<T>(message: &T) -> Result<(), TestCaseError>
where
    T: std::fmt::Debug + serde::Serialize + serde::de::DeserializeOwned,
{
    let mut bytes = encode(message).unwrap();
    let read: T = decode(&bytes).unwrap();
    prop_assert_eq!(format!("{:?}", read), format!("{:?}", message));
    prop_assert_eq!(&encode(&read).unwrap(), &bytes);
    for len in 0..bytes.len() {
        prop_assert!(decode::<T>(&bytes[..len]).is_err(), "cut off after {} bytes", len);
    }
    bytes.push(0);
    prop_assert!(decode::<T>(&bytes).is_err(), "bytes are left over");
    Ok(())
}

proptest! {
    // A failure prints its input; the checkout stays as it is.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn requests_round_trip_and_other_lengths_are_rejected(request in request()) {
        check_message(&request)?;
    }

    #[test]
    fn replies_round_trip_and_other_lengths_are_rejected(reply in reply()) {
        check_message(&reply)?;
    }

    #[test]
    fn arbitrary_bytes_decode_or_fail(bytes in vec(any::<u8>(), 0..200)) {
        if let Ok(request) = decode::<Request>(&bytes) {
            check_message(&request)?;
        }
        if let Ok(reply) = decode::<Reply>(&bytes) {
            check_message(&reply)?;
        }
    }

    #[test]
    fn debug_of_secrets_is_the_same_for_all_of_one_length(token: [u8; 16], bytes in vec(any::<u8>(), 0..80)) {
        let shown = format!("{:?}", Token::from_bytes(token));
        prop_assert_eq!(shown, format!("{:?}", Token::from_bytes([0; 16])));
        let zeros = HandleBytes::new(vec![0; bytes.len()]);
        prop_assert_eq!(format!("{:?}", HandleBytes::new(bytes)), format!("{:?}", zeros));
    }

    #[test]
    fn debug_of_a_request_does_not_show_its_token(token: [u8; 16]) {
        let open = |token| Request::Open {
            request: RequestId(1),
            export: ExportId(2),
            token: Token::from_bytes(token),
            grant: Some(Token::from_bytes(token)),
            access: Access::ReadOnly,
            on: 0,
            peer: Vec::new(),
            like: None,
        };
        prop_assert_eq!(format!("{:?}", open(token)), format!("{:?}", open([0; 16])));
    }

    #[test]
    fn debug_of_a_grant_does_not_show_its_handles(bytes in vec(any::<u8>(), 0..80)) {
        let grant = |bytes: Vec<u8>| OpenedExport {
            request: RequestId(1),
            lease: LeaseId(2),
            handles: vec![WireHandle {
                allocation: AllocationId(3),
                kind: HandleKind(1),
                bytes: crate::backend::HandleBytes::new(bytes.clone()),
                fds: 0,
                size: 4096,
                generation: None,
            }],
            ready: Some(crate::backend::HandleBytes::new(bytes)),
            keep: true,
            confirm: false,
            like: false,
            slot: None,
            ahead: Vec::new(),
        };
        let zeros = vec![0; bytes.len()];
        prop_assert_eq!(format!("{:?}", grant(bytes)), format!("{:?}", grant(zeros)));
    }
}
