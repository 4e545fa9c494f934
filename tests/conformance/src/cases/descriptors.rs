//! Descriptors that were damaged on their way, or made by somebody who lies. None may panic, none may open anything, and
//! each says what is wrong with it.

use device_ipc_core::limits::{MAX_DESCRIPTOR_BYTES, TEXT_PREFIX};
use device_ipc_core::{Descriptor, DescriptorError, Export, Ipc};

use crate::agent::{Opening, Place};
use crate::check::{equal, refused, refused_as_one_of, that};
use crate::flows::{Memory, SOON, nobody_holds, pattern};
use crate::{Context, Outcome, Stop, fail, wire};

const KIND: &str = "Descriptor";

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

/// Cut off anywhere, the bytes are refused; so is the text.
pub fn truncated_at_every_length(context: &Context) -> Outcome {
    let (_memory, share) = shared(context)?;
    let bytes = share.descriptor().to_bytes();
    for len in 0..bytes.len() {
        let what = format!("{len} of {} bytes", bytes.len());
        let phrases: &[&str] = if len >= 4 { &["cut off"] } else { &[] };
        refused(Descriptor::from_bytes(&bytes[..len]), &what, KIND, phrases)?;
    }
    let text = share.descriptor().to_string();
    for len in 0..text.len() {
        let phrases: &[&str] = if len >= TEXT_PREFIX.len() { &["cut off"] } else { &[] };
        let what = format!("{len} of {} characters", text.len());
        refused(text[..len].parse::<Descriptor>(), &what, KIND, phrases)?;
    }
    Ok(())
}

/// Trailing bytes are refused, and so is a length above the maximum, before anything is read.
pub fn trailing_and_oversized(context: &Context) -> Outcome {
    let (_memory, share) = shared(context)?;
    let mut bytes = share.descriptor().to_bytes();
    bytes.push(0);
    refused(Descriptor::from_bytes(&bytes), "a byte behind the end", KIND, &["1 bytes follow"])?;
    bytes.resize(MAX_DESCRIPTOR_BYTES + 1, 0);
    refused(Descriptor::from_bytes(&bytes), "too many bytes", KIND, &["exceeds the maximum size"])?;
    let text = format!("{TEXT_PREFIX}{}", "A".repeat(MAX_DESCRIPTOR_BYTES * 2));
    refused(text.parse::<Descriptor>(), "too long a text", KIND, &["exceeds the maximum size"])
}

/// One flipped bit, anywhere, is noticed.
pub fn every_flipped_bit(context: &Context) -> Outcome {
    let (_memory, share) = shared(context)?;
    let bytes = share.descriptor().to_bytes();
    for bit in 0..bytes.len() * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        let what = format!("bit {} of byte {} flipped", bit % 8, bit / 8);
        // Behind the magic number it is a descriptor, whatever length it states now.
        let phrases: &[&str] = if bit >= 4 * 8 { &["damaged"] } else { &[] };
        refused(Descriptor::from_bytes(&damaged), &what, KIND, phrases)?;
    }
    Ok(())
}

/// One damaged character of the text, anywhere, is noticed.
pub fn every_damaged_character(context: &Context) -> Outcome {
    let (_memory, share) = shared(context)?;
    let text = share.descriptor().to_string();
    for at in 0..text.len() {
        for other in ["A", "_", "+", "é", "\n"] {
            if &text[at..=at] == other {
                continue;
            }
            let damaged = format!("{}{other}{}", &text[..at], &text[at + 1..]);
            let trimmed_is_whole = damaged.trim() == text;
            if !trimmed_is_whole {
                refused(damaged.parse::<Descriptor>(), &format!("{other:?} as character {at}"), KIND, &[])?;
            }
        }
    }
    Ok(())
}

/// Other text is distinguished from a damaged descriptor.
pub fn wrong_prefix(context: &Context) -> Outcome {
    let (_memory, share) = shared(context)?;
    let text = share.descriptor().to_string();
    for other in ["", "hello", &text[1..], &format!("x{text}"), &text.to_uppercase()] {
        refused(other.parse::<Descriptor>(), "text with another prefix", KIND, &["not a device-ipc descriptor", "dipc1:"])?;
    }
    refused(Descriptor::from_bytes(b"\x80\x04pickle, for example"), "bytes of something else", KIND, &["not a device-ipc descriptor"])
}

/// Unknown versions and features are named, with the side that must be updated.
pub fn unknown_versions(context: &Context) -> Outcome {
    let (_memory, share) = shared(context)?;
    let descriptor = share.descriptor();
    let newer = wire::altered(descriptor, |bytes| bytes[wire::MAJOR.start] += 1);
    refused(newer, "the next major version", KIND, &["format 2.", "update device-ipc in the receiving process"])?;
    let older = wire::altered(descriptor, |bytes| bytes[wire::MAJOR.start] -= 1);
    refused(older, "the major version before", KIND, &["format 0.", "update device-ipc in the exporting process"])?;
    let features = wire::altered(descriptor, |bytes| bytes[wire::FLAGS.start] |= 0x80);
    refused(features, "an unknown mandatory feature", KIND, &["features 0x0080", "update the receiver"])?;
    let minor = wire::altered(descriptor, |bytes| bytes[wire::MINOR.start] += 1)?;
    equal(minor.len(), descriptor.len(), "the length of the region, from a descriptor of a newer minor version")
}

/// Fields that make no sense are refused although the checksum fits.
pub fn senseless_fields(context: &Context) -> Outcome {
    let (_memory, share) = shared(context)?;
    let descriptor = share.descriptor();
    let at = wire::places(descriptor);
    let set = |place: std::ops::Range<usize>, value: u64| {
        wire::altered(descriptor, |bytes| bytes[place].copy_from_slice(&value.to_le_bytes()))
    };
    let size = wire::extent_size(&descriptor.to_bytes());
    let region: [(&str, Result<_, DescriptorError>); 6] = [
        ("a region of no bytes", set(at.len.clone(), 0)),
        ("a region that is longer than its allocation", set(at.len.clone(), 1 << 40)),
        ("an offset behind the allocation", set(at.offset.clone(), 1 << 40)),
        ("an offset at the end of the address space", set(at.offset.clone(), u64::MAX)),
        ("a length that wraps around", set(at.len.clone(), u64::MAX)),
        ("an allocation smaller than the region", set(size.clone(), 1)),
    ];
    for (what, result) in region {
        refused(result, what, KIND, &["invalid descriptor: region"])?;
    }
    refused(set(size, 0), "an allocation of no bytes", KIND, &["invalid descriptor"])?;
    let name = wire::altered(descriptor, |bytes| bytes[wire::HEAD_BYTES] = b'/');
    refused(name, "a slash in the backend's name", KIND, &["backend"])?;
    let long = wire::altered(descriptor, |bytes| bytes[wire::ADDRESS_BYTES] = 200);
    refused(long, "too long an address", KIND, &[])
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
