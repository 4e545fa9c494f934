//! Two processes with different visible devices: named by position or identity, or without the other's device. Without two GPUs,
//! each test reports it and passes.

use std::collections::HashMap;
use std::time::Duration;

use crate::gpu::backend;
use device_ipc_core::backend::DeviceIpc;
use device_ipc_core::{Descriptor, DeviceOrdinal, Error, Ipc, Mapping, Result};
use device_ipc_cuda::CudaBackend;
use device_ipc_test_process::{Process, serve};

const VARIABLE: &str = "CUDA_VISIBLE_DEVICES";
const BYTES: u64 = 2 << 20;
const SOON: Duration = Duration::from_secs(30);

/// Returns the identities of two devices in the format of `nvidia-smi -L`, which the variable accepts.
fn two_devices() -> Option<[String; 2]> {
    let (backend, _alone) = backend()?;
    let devices = backend.devices().unwrap();
    let mut names = devices.iter().map(|device| format!("GPU-{}", device.identity));
    let two = names.next().zip(names.next()).map(|(first, second)| [first, second]);
    if two.is_none() {
        eprintln!("skipped: one device");
    }
    two
}

fn with_visible(device: &str) -> Process {
    Process::of_test(concat!(module_path!(), "::the_other_process"), &[(VARIABLE, device)])
}

#[test]
fn uuid_prefix_and_position_name_the_same_device() {
    let Some([first, second]) = two_devices() else { return };
    let mut exporter = with_visible(&second);
    let descriptor = exporter.ask("share 0 3");
    let beginning = &second[..second.find('-').unwrap() + 9];
    for name in [beginning, "1"] {
        let mut importer = with_visible(name);
        assert_eq!(importer.ask("devices"), second, "{name}");
        assert_eq!(importer.ask(&format!("home {descriptor}")), format!("device 0, at home, of {second}: 3"));
        assert_eq!(importer.ask("close"), "closed");
        importer.finish();
    }
    assert_ne!(first, second);
    exporter.finish();
}

#[test]
fn hidden_home_opens_on_another_device_or_names_the_variable() {
    let Some([first, second]) = two_devices() else { return };
    let mut exporter = with_visible(&first);
    let mut importer = with_visible(&second);
    let descriptor = exporter.ask("share 0 9");
    let refusal = importer.ask(&format!("home {descriptor}"));
    for word in ["HomeNotVisible", VARIABLE, &first["GPU-".len()..]] {
        assert!(refusal.contains(word), "{word:?} is not in: {refusal}");
    }
    let away = importer.ask(&format!("away {descriptor}"));
    let served = away == format!("device 0, away from home, of {first}: 9");
    let refused = away.starts_with("NoPeerAccess")
        && away.contains("StagedIfNeeded")
        && away.contains(&first["GPU-".len()..]);
    assert!(served || refused, "{away}");
    eprintln!("memory of a hidden card: {away}");
    assert_eq!(importer.ask("close"), "closed");
    importer.finish();
    assert_eq!(exporter.ask("released"), "released");
    exporter.finish();
}

#[test]
#[ignore = "the child of the other tests"]
fn the_other_process() {
    let backend = CudaBackend::load().unwrap();
    let ipc = Ipc::with_backend(backend.clone());
    let mut shares = Vec::new();
    let mut mapped = HashMap::new();
    serve(|request, argument| match request {
        "devices" => {
            let names =
                backend.devices().unwrap().into_iter().map(|device| format!("GPU-{}", device.identity));
            names.collect::<Vec<_>>().join(" ")
        }
        "share" => {
            let (ordinal, byte) = argument.split_once(' ').unwrap();
            let ordinal = DeviceOrdinal::new(ordinal.parse().unwrap());
            let buffer = ipc.allocate(ordinal, BYTES).unwrap();
            let stream = ipc.create_stream(ordinal).unwrap();
            buffer.view_mut::<u8, _>(&stream).unwrap().fill_bytes(byte.parse().unwrap()).unwrap();
            stream.synchronize().unwrap();
            shares.push(ipc.share(buffer).start().unwrap());
            shares.last().unwrap().descriptor().to_string()
        }
        "released" => match shares.drain(..).try_for_each(|share| share.close(SOON)) {
            Ok(()) => "released".to_owned(),
            Err(error) => error.to_string(),
        },
        "close" => {
            mapped.clear();
            device_ipc_core::close_unused(SOON).unwrap();
            "closed".to_owned()
        }
        _ => {
            let descriptor: Descriptor = argument.parse().unwrap();
            let open = ipc.open(&descriptor);
            match if request == "home" { open.at_home() } else { open.on_device(0) } {
                Ok(mapping) => {
                    let text = look(&ipc, &mapping).unwrap();
                    mapped.insert(argument.to_owned(), mapping);
                    text
                }
                Err(error) => format!("{}: {error}", kind(&error)),
            }
        }
    });
}

fn look(ipc: &Ipc, mapping: &Mapping) -> Result<String> {
    let stream = ipc.create_stream(mapping.device())?;
    let bytes = mapping.view::<u8, _>(&stream)?.to_vec()?;
    let place = if mapping.is_at_home() { "at home" } else { "away from home" };
    assert!(bytes.iter().all(|byte| *byte == bytes[0]));
    Ok(format!("device {}, {place}, of GPU-{}: {}", mapping.device(), mapping.home(), bytes[0]))
}

fn kind(error: &Error) -> String {
    let text = format!("{error:?}");
    text.split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default().to_owned()
}
