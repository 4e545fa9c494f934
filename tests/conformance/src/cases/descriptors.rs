//! Descriptors that name another backend, another export or another home than that of their export: none opens anything, and each
//! says what is wrong with it. Those that are damaged need no backend: the unit tests of the core refuse them.

use device_ipc_core::limits::TEXT_PREFIX;
use device_ipc_core::{Descriptor, Export, Ipc};

use crate::agent::{Opening, Place};
use crate::check::{equal, refused, refused_as_one_of, that};
use crate::flows::{Memory, SOON, nobody_holds, pattern};
use crate::{Context, Outcome, Stop, fail, wire};

fn shared(context: &Context) -> Result<(Memory, Export), Stop> {
    let memory = Memory::with_bytes(context, 0, &pattern(4096))?;
    let share = memory.share_part(128, 1024)?;
    Ok((memory, share))
}

/// Text and bytes are read back as they were; white space around the text does not matter, as files and shells add it.
pub fn forms_are_read_back(context: &Context) -> Outcome {
    let (_memory, share) = shared(context)?;
    let descriptor = share.descriptor();
    let text = descriptor.to_string();
    that(text.starts_with(TEXT_PREFIX), format!("the text should begin with {TEXT_PREFIX:?}"))?;
    that(!text.contains(char::is_whitespace), "the text should be one line without blanks")?;
    for form in [text.clone(), format!("  {text}\r\n")] {
        equal(&form.parse::<Descriptor>()?, descriptor, "the descriptor read back from its text")?;
    }
    equal(&Descriptor::from_bytes(&descriptor.to_bytes())?, descriptor, "the descriptor read back from its bytes")?;
    let json = serde_json::to_string(descriptor)?;
    equal(&serde_json::from_str::<Descriptor>(&json)?, descriptor, "the descriptor read back from JSON")?;
    equal(descriptor.len(), 1024, "the length of the region")?;
    equal(descriptor.backend(), context.backend().info().name, "the backend's name")
}

/// Neither the debug form nor the readable view shows the token: both are logged.
pub fn secret_is_not_shown(context: &Context) -> Outcome {
    let (_memory, share) = shared(context)?;
    let bytes = share.descriptor().to_bytes();
    let token = &bytes[wire::places(share.descriptor()).token];
    let decimals = token.iter().map(u8::to_string).collect::<Vec<_>>().join(", ");
    let shown = format!("{:?} {}", share, serde_json::to_string(&share.descriptor().view())?);
    for secret in [data_encoding::HEXLOWER.encode(token), decimals] {
        that(!shown.to_lowercase().contains(&secret), "the debug form or the view shows the secret token")?;
    }
    Ok(())
}

/// A descriptor of another backend says which, and how to get that one.
pub fn another_backend(context: &Context) -> Outcome {
    let (memory, share) = shared(context)?;
    let other = wire::altered(share.descriptor(), |bytes| {
        let name = wire::backend_name(bytes);
        bytes[name].fill(b'z');
    })?;
    let phrases = [other.backend(), context.backend().info().name, "Ipc::named"];
    refused(memory.ipc.open(&other).at_home(), "opening another backend's memory", "WrongBackend", &phrases)?;
    refused(Ipc::named("no-such-backend"), "a backend that there is not", "UnknownBackend", &["no-such-backend", "register"])
}

/// Who alters the secret, the export's number, the allocation's size or its generation gets nothing, and the untouched
/// descriptor still opens.
pub fn altered_and_with_a_fitting_checksum(context: &Context) -> Outcome {
    let (memory, share) = shared(context)?;
    let descriptor = share.descriptor();
    let at = wire::places(descriptor);
    let (size, generation) = {
        let bytes = descriptor.to_bytes();
        (wire::extent_size(&bytes), wire::extent_generation(&bytes))
    };
    let cases: [(&str, std::ops::Range<usize>, &str, &str); 7] = [
        ("the token altered", at.token.clone(), "NotPermitted", "altered"),
        ("the allocation's number altered", generation, "StaleGeneration", "allocation"),
        ("the allocation's size altered", size, "StaleGeneration", "allocation"),
        ("the boot id altered", wire::BOOT, "Rebooted", "last boot"),
        ("the network namespace altered", wire::NET_NAMESPACE, "OtherNetworkNamespace", "DEVICE_IPC_SOCKET_DIR"),
        ("the start time altered", wire::START_TIME, "ExporterGone", "has terminated"),
        ("the export's number altered", at.export.clone(), "ExportDropped", "dropped"),
    ];
    let mut importer = context.agent()?;
    for (what, place, kind, phrase) in cases {
        let altered = wire::altered(descriptor, |bytes| wire::flip(bytes, place.clone()))?;
        let result = importer.try_open("m", Opening::new(&altered, Place::Device(0)))?;
        refused_as_one_of(result, what, &[kind], &[phrase])?;
        nobody_holds(&share, what)?;
    }
    let elsewhere = wire::altered(descriptor, |bytes| {
        wire::flip(bytes, wire::BOOT);
        wire::flip(bytes, wire::HOST);
    })?;
    let result = importer.try_open("m", Opening::new(&elsewhere, Place::Device(0)))?;
    refused(result, "another host", "OtherHost", &["another host", "within one host"])?;
    let token = wire::altered(descriptor, |bytes| wire::flip(bytes, at.token.clone()))?;
    refused(memory.ipc.open(&token).at_home(), "the token altered, in its own process", "NotPermitted", &["altered"])?;
    importer.open("m", descriptor, Place::Home)?;
    crate::check::same(&importer.bytes("m")?, &pattern(4096)[128..1152], "the bytes, opened after all that")?;
    importer.drop_mapping("m")?;
    Ok(share.wait_released(SOON)?)
}

/// A home that no device has is not taken for another one.
pub fn altered_home(context: &Context) -> Outcome {
    let (_memory, share) = shared(context)?;
    let home = wire::places(share.descriptor()).home;
    let altered = wire::altered(share.descriptor(), |bytes| wire::flip(bytes, home))?;
    let mut importer = context.agent()?;
    match importer.try_open("m", Opening::new(&altered, Place::Home))? {
        Ok(_) => fail("memory was opened at a home that no device has"),
        error => refused(error, "opening at a home that no device has", "HomeNotVisible", &["not visible"]),
    }
}
