//! Tests: every variant has a text, and no chain of errors repeats a text.

use std::collections::HashSet;
use std::error::Error as StdError;
use std::time::Instant;

use super::*;
use crate::model::layout::Dtype;
use crate::model::lease::{Holder, LeaseState};

/// One sample of each variant; a variant without a sample does not compile.
macro_rules! samples {
    ($samples:ident: $error:ident { $($variant:ident => $sample:expr),+ $(,)? }) => {
        fn $samples() -> Vec<$error> {
            fn name(error: &$error) -> &'static str {
                match error {
                    $($error::$variant { .. } => stringify!($variant),)+
                }
            }
            let all = vec![$((stringify!($variant), $sample)),+];
            for (expected, sample) in &all {
                assert_eq!(name(sample), *expected);
            }
            all.into_iter().map(|(_, sample)| sample).collect()
        }
    };
}

const PID: u32 = 4711;
const TIME: Duration = Duration::from_millis(250);
const PTR: DevicePtr = DevicePtr::new(0x7f00_0000_1000);
const HOME: DeviceIdentity = DeviceIdentity::Uuid([7; 16]);

fn text(text: &str) -> String {
    text.to_owned()
}

fn device(ordinal: u32) -> DeviceOrdinal {
    DeviceOrdinal::new(ordinal)
}

fn vendor() -> VendorError {
    VendorError {
        backend: "mock",
        call: "mockAllocate",
        status: VendorStatus(2),
        name: text("MOCK_OUT_OF_MEMORY"),
        message: text("the device is full"),
        hint: text("free some memory"),
    }
}

fn holders() -> Holders {
    let state = LeaseState::InUse;
    let holder =
        Holder { pid: PID, program: text("reader"), bytes: 4096, since: std::time::Instant::now(), state };
    Holders { now: vec![holder.clone()], ever: 1, died: vec![holder] }
}

fn io_error() -> std::io::Error {
    std::io::Error::from_raw_os_error(2)
}

samples!(layout_errors: LayoutError {
    UnknownDtype => LayoutError::UnknownDtype(250),
    TooManyDimensions => LayoutError::TooManyDimensions(65),
    Strides => LayoutError::Strides { dimensions: 2, strides: 1 },
    Overflow => LayoutError::Overflow,
    TooLarge => LayoutError::TooLarge { needed: 96, region: 80 },
    NotWholeElements => LayoutError::NotWholeElements { dtype: Dtype::F32, region: 83, element: 4 },
    NoDtype => LayoutError::NoDtype,
    WrongDtype => LayoutError::WrongDtype { actual: Dtype::F32, wanted: Dtype::U8 },
    Unaligned => LayoutError::Unaligned { address: 1, element: 4 },
    Misaligned => LayoutError::Misaligned { address: 1, len: 80, element: 4 },
    NotContiguous => LayoutError::NotContiguous { shape: vec![4, 4], strides: vec![5, 1] },
    Named => LayoutError::Named(3),
    NoTensor => LayoutError::NoTensor,
    Repeated => LayoutError::Repeated { bytes: 1 << 40, memory: 80, shape: vec![1 << 36, 4], strides: vec![0, 1] },
    Differs => LayoutError::Differs { what: text("the shape of \"w\""), expected: text("[4]"), found: text("[5]") },
    OtherTensor => LayoutError::OtherTensor { exporter: text("float32 [4]"), destination: text("float32 [5]") },
});

samples!(descriptor_errors: DescriptorError {
    NotText => DescriptorError::NotText { name: "grant", prefix: "dipcg1:", found: text("an empty text") },
    BadCharacter => DescriptorError::BadCharacter { position: 7, found: '@' },
    BadMagic => DescriptorError::BadMagic,
    Version => DescriptorError::Version {
        found: FormatVersion { major: 2, minor: 0 },
        readable: FormatVersion { major: 1, minor: 1 },
    },
    UnknownFeatures => DescriptorError::UnknownFeatures { flags: 1 },
    Truncated => DescriptorError::Truncated { found: 100, expected: 230 },
    TrailingBytes => DescriptorError::TrailingBytes { extra: 3 },
    TooLarge => DescriptorError::TooLarge { found: 1 << 30 },
    BadChecksum => DescriptorError::BadChecksum,
    BadGrant => DescriptorError::BadGrant { why: "it is damaged or cut off" },
    BadField => DescriptorError::BadField { field: "length", why: text("it is shorter than the fixed part") },
    Layout => DescriptorError::Layout(LayoutError::Overflow),
    UnknownSection => DescriptorError::UnknownSection { kind: 99 },
    Kind => DescriptorError::Kind { expected: "a ring", found: "named tensors", remedy: Remedy::OpenMemory },
    TensorName => DescriptorError::TensorName { name: String::new(), why: "it is empty" },
    Tensor => DescriptorError::Tensor { name: text("w"), cause: LayoutError::Overflow },
});

samples!(errors: Error {
    NoBackend => Error::NoBackend(Vec::new()),
    BackendUnavailable => Error::BackendUnavailable {
        backend: Some(text("acme")),
        reason: Unavailable::NoDevice { detail: text("ACME_VISIBLE_DEVICES is empty") },
    },
    UnknownBackend => Error::UnknownBackend { name: text("acne"), known: vec![text("acme"), text("mock")] },
    WrongBackend => {
        Error::WrongBackend { what: "the stream", found: text("acme"), expected: text("mock") }
    },
    Vendor => Error::Vendor(Box::new(vendor())),
    Unsupported => Error::Unsupported { backend: "mock", what: text("do this"), why: text("it is off") },
    Descriptor => Error::Descriptor(DescriptorError::BadChecksum),
    NotDeviceMemory => Error::NotDeviceMemory { ptr: PTR, why: text("it is memory of the host") },
    InvalidRegion => Error::InvalidRegion(text("it has no bytes")),
    NotShareable => {
        Error::NotShareable { ptr: PTR, kind: text("managed memory"), remedy: text("share a copy") }
    },
    SharedOn => Error::SharedOn { ptr: PTR },
    NoSuchDevice => Error::NoSuchDevice { backend: "mock", ordinal: device(3), count: 2 },
    HomeNotVisible => Error::HomeNotVisible { home: HOME, variable: "ACME_VISIBLE_DEVICES" },
    NotInDeviceMap => Error::NotInDeviceMap { home: HOME, peer: None },
    InvalidDeviceMap => Error::InvalidDeviceMap(text("two devices lead to device 1")),
    NoPeerAccess => Error::NoPeerAccess { from: device(1), to: HOME },
    WrongStream => Error::WrongStream { stream: device(1), what: "the mapping", expected: device(0) },
    StreamCapturing => Error::StreamCapturing { what: "waiting" },
    Exposes => Error::Exposes { region: 1000, reachable: text("3096 bytes"), why: text("they share a page") },
    InvalidInput => Error::invalid_input("timeline value 3", "4 was signalled before"),
    OutOfMemory => Error::OutOfMemory { device: device(0), bytes: 4096, detail: text("0 bytes are free") },
    Layout => Error::Layout(LayoutError::Overflow),
    AccessDenied => Error::AccessDenied { wanted: Access::ReadWrite, granted: Access::ReadOnly },
    AddressesInUse => Error::AddressesInUse {
        range: DeviceRange::new(device(0), PTR, 4096),
        detail: text("another mapping has them"),
    },
    Suspended => Error::Suspended,
    OverlapsInUse => Error::OverlapsInUse { detail: text("address in use") },
    ExporterGone => Error::ExporterGone { pid: PID },
    ImporterGone => Error::ImporterGone { pid: PID },
    LeaseEnded => Error::LeaseEnded { pid: PID },
    ExportDropped => Error::ExportDropped { pid: PID },
    GrantEnded => Error::GrantEnded { pid: PID },
    StaleGeneration => Error::StaleGeneration(text("number 2, not 1")),
    Rebooted => Error::Rebooted,
    OtherHost => Error::OtherHost { exporter: text("one"), local: text("other"), listens: false },
    OtherNetworkNamespace => Error::OtherNetworkNamespace,
    NotPermitted => Error::NotPermitted(text("user 1000")),
    QuotaExceeded => Error::QuotaExceeded(text("process 7 has 4 channels of at most 4")),
    Refused => Error::Refused { pid: 7, kind: ErrorKind::OutOfMemory, detail: text("0 bytes are free there") },
    Protocol => Error::Protocol(text("an unknown message")),
    Io => Error::io("connecting", io_error()),
    Timeout => Error::Timeout { what: text("the answer"), after: TIME, detail: String::new() },
    StillHeld => Error::StillHeld { after: TIME, holders: holders() },
    HolderDied => Error::HolderDied { holders: holders() },
    NotOpened => Error::NotOpened { after: TIME, opened: 0, expected: 1 },
    Forked => Error::Forked,
    RingClosed => Error::RingClosed { pid: PID },
    RingUnpublished => {
        Error::RingUnpublished { first: 3, last: 4, source: Box::new(Error::RingClosed { pid: PID }) }
    },
    RingSlotsHeld => Error::RingSlotsHeld { slots: 2 },
    DismissedFromRing => Error::DismissedFromRing { pid: PID },
    ChannelNameInUse => Error::ChannelNameInUse { name: text("x"), pid: PID, program: text("reader") },
    NoListener => Error::NoListener { name: text("x"), after: TIME, detail: text("check the name") },
    MessageTooLarge => Error::MessageTooLarge { of: "bytes", size: 2048, limit: 1024 },
    ChannelClosed => Error::ChannelClosed { pid: PID, program: text("reader") },
    PeerGone => Error::PeerGone { pid: PID, program: text("reader") },
    InBundle => Error::InBundle { tensor: text("w"), cause: Box::new(Error::Vendor(Box::new(vendor()))) },
    InPull => Error::InPull {
        pid: PID,
        host: text("one"),
        address: ([10, 0, 0, 1], 80).into(),
        cause: Box::new(Error::Vendor(Box::new(vendor()))),
    },
    NoSuchTensor => Error::NoSuchTensor { name: text("v"), known: text("there are none") },
    OnWorkerThread => Error::OnWorkerThread { call: "closing an export" },
    RingNotYet => {
        Error::RingNotYet { sequence: 2, what: "published", why: text("a stream has yet to get there") }
    },
});

/// The texts of an error and of its sources.
fn chain(error: &(dyn StdError + 'static)) -> Vec<String> {
    let mut texts = vec![error.to_string()];
    let mut source = error.source();
    while let Some(error) = source {
        texts.push(error.to_string());
        source = error.source();
    }
    texts
}

#[track_caller]
fn repeats_nothing(error: &(dyn StdError + 'static)) {
    let texts = chain(error);
    for (index, source) in texts.iter().enumerate().skip(1) {
        assert!(!source.is_empty());
        for before in &texts[..index] {
            assert!(!before.contains(source.as_str()), "{error:?} says twice: {source}\n{texts:?}");
        }
    }
}

#[test]
fn error_chain_says_nothing_twice() {
    layout_errors().iter().for_each(|error| repeats_nothing(error));
    descriptor_errors().iter().for_each(|error| repeats_nothing(error));
    errors().iter().for_each(|error| repeats_nothing(error));
    // As callers of the public functions get them.
    layout_errors().into_iter().map(DescriptorError::Layout).for_each(|error| repeats_nothing(&error));
    layout_errors().into_iter().map(Error::Layout).for_each(|error| repeats_nothing(&error));
    descriptor_errors().into_iter().map(Error::Descriptor).for_each(|error| repeats_nothing(&error));
    for error in errors() {
        let in_bundle = error.of_tensor("w");
        repeats_nothing(&in_bundle);
    }
    let missing = || Error::NoSuchTensor { name: text("w"), known: text("there are none") };
    assert_eq!(missing().of_tensor("w").to_string(), missing().to_string());
}

/// A waiter that gets the error of another one loses nothing.
#[test]
fn clone_of_an_error_has_its_facts_and_its_source() {
    for error in errors() {
        assert_eq!(format!("{:?}", error.clone()), format!("{error:?}"));
    }
    let Error::Io { cause, .. } = Error::io("connecting", io_error()).clone() else { panic!() };
    assert_eq!(cause.raw_os_error(), Some(2));
}

#[test]
fn error_texts_are_present_and_distinct() {
    let texts: Vec<_> = errors().iter().map(ToString::to_string).collect();
    assert!(texts.iter().all(|text| !text.is_empty()));
    let distinct: HashSet<_> = texts.iter().collect();
    assert_eq!(distinct.len(), texts.len());
}

#[test]
fn error_text_names_its_cause() {
    assert!(Error::io("connecting", io_error()).to_string().contains("No such file"));
    let in_bundle = Error::from(vendor()).of_tensor("w").to_string();
    assert!(in_bundle.contains("MOCK_OUT_OF_MEMORY") && in_bundle.contains("\"w\""), "{in_bundle}");
}

#[test]
fn export_that_was_not_released_names_its_holders() {
    let text = |now: Vec<Holder>| {
        Error::StillHeld {
            after: Duration::from_secs(2),
            holders: Holders { now, ever: 3, died: Vec::new() },
        }
        .to_string()
    };
    let released = text(Vec::new());
    assert!(released.contains("no process holds it now (opened 3 times)"), "{released}");
    let state = LeaseState::Idle;
    let holder = Holder { pid: 7, program: "reader".into(), bytes: 4096, since: Instant::now(), state };
    let held = text(vec![holder]);
    assert!(
        held.starts_with("after 2000 ms the export is still held: process 7 (reader) has held 4096 bytes"),
        "{held}"
    );
    assert!(held.ends_with(" s, idle"), "{held}");
}

#[test]
fn export_that_was_not_opened_says_how_often_it_was() {
    let text =
        |opened, expected| Error::NotOpened { after: Duration::from_secs(2), opened, expected }.to_string();
    let never = text(0, 1);
    assert!(never.starts_with("no process has opened the export within 2000 ms; check that"), "{never}");
    let less = text(1, 3);
    assert!(less.starts_with("the export was opened 1 of 3 times within 2000 ms; check that"), "{less}");
    assert!(!never.contains("held") && !less.contains("held"));
}

/// The names of the variants of a kind.
fn variants_of(kind: ErrorKind) -> Vec<String> {
    let name = |error: &Error| {
        let debug = format!("{error:?}");
        debug
            .split(|character: char| !character.is_alphanumeric())
            .next()
            .map(str::to_owned)
            .unwrap_or_default()
    };
    errors().iter().filter(|error| error.kind() == kind).map(name).collect()
}

#[test]
fn errors_of_one_kind_need_one_reaction() {
    assert_eq!(variants_of(ErrorKind::Gone), ["ExporterGone", "ImporterGone", "HolderDied", "PeerGone"]);
    assert_eq!(
        variants_of(ErrorKind::Closed),
        ["LeaseEnded", "RingClosed", "RingUnpublished", "ChannelClosed"]
    );
    assert_eq!(
        variants_of(ErrorKind::Stale),
        ["ExportDropped", "GrantEnded", "StaleGeneration", "Rebooted", "DismissedFromRing"]
    );
    assert_eq!(variants_of(ErrorKind::Timeout), ["Timeout", "StillHeld", "NotOpened", "NoListener"]);
    assert_eq!(variants_of(ErrorKind::NotPermitted), ["AccessDenied", "NotPermitted"]);
}

#[test]
fn error_of_a_tensor_or_of_the_system_has_the_kind_of_its_cause() {
    for error in errors() {
        let in_bundle = Error::InBundle { tensor: text("w"), cause: Box::new(error.clone()) };
        assert_eq!(in_bundle.kind(), error.kind());
    }
    let system = |kind: std::io::ErrorKind| Error::io("connecting", kind).kind();
    assert_eq!(system(std::io::ErrorKind::TimedOut), ErrorKind::Timeout);
    assert_eq!(system(std::io::ErrorKind::PermissionDenied), ErrorKind::NotPermitted);
    assert_eq!(system(std::io::ErrorKind::NotFound), ErrorKind::System);
}

/// The `?` operator converts every smaller error of the public functions.
#[test]
fn smaller_errors_convert_into_error() {
    fn converts<E: Into<Error>>(error: E) -> Error {
        error.into()
    }
    let reason = Unavailable::NoDevice { detail: text("none") };
    assert_eq!(converts(reason.clone()).to_string(), format!("the backend cannot be used: {reason}"));
    assert!(matches!(converts(LayoutError::Overflow), Error::Layout(_)));
    assert!(matches!(converts(DescriptorError::BadMagic), Error::Descriptor(_)));
    assert!(matches!(converts(vendor()), Error::Vendor(_)));
}
