//! Safetensors files: several of them, and invalid ones.

use std::collections::HashMap;

use device_ipc::DeviceOrdinal;
use safetensors::tensor::{Dtype, TensorView};

use super::{ipc, keep, model, open, safetensors, unique, values};
use crate::support::{Directory, run};

#[test]
fn shards_of_a_directory_are_placed_by_the_device_map() {
    let directory = Directory::new();
    let models = directory.path("models");
    std::fs::create_dir(&models).unwrap();
    std::fs::write(
        models.join("model-00001.safetensors"),
        safetensors(&[("model.layers.0.w", &[0.0; 5]), ("model.layers.1.w", &[1.0; 300])]),
    )
    .unwrap();
    std::fs::write(
        models.join("model-00002.safetensors"),
        safetensors(&[("model.layers.10.w", &[10.0; 7]), ("head.w", &[11.0])]),
    )
    .unwrap();
    std::fs::write(models.join("config.json"), "{}").unwrap();
    let name = unique("shards");
    let map = directory.file("map.json", br#"{"model.layers.1": 1, "head": 1, "nothing": 0}"#);
    let models = models.to_str().unwrap();
    let mut keeper =
        crate::support::start(["keep", models, "--name", &name, "--device-map", &format!("@{map}")]);
    keeper.until("no tensor belongs to \"nothing\"");
    assert!(keeper.until("keeps version").contains("4 tensors"));
    let ipc = ipc();
    let (_, mapping) = open(&ipc, &name).unwrap();
    for (tensor, device, value, len) in [
        ("model.layers.0.w", 0, 0.0, 5),
        ("model.layers.1.w", 1, 1.0, 300),
        ("model.layers.10.w", 0, 10.0, 7),
        ("head.w", 1, 11.0, 1),
    ] {
        assert_eq!(mapping.get(tensor).unwrap().device(), DeviceOrdinal::new(device), "{tensor}");
        assert_eq!(values(&ipc, &mapping, tensor), vec![value; len], "{tensor}");
    }
    // One block for each device.
    assert_eq!(mapping.descriptor().allocations(), 2);
}

#[test]
fn tensors_of_every_element_type_keep_their_bytes() {
    let types = [
        (Dtype::BOOL, "bool", 1),
        (Dtype::U8, "uint8", 1),
        (Dtype::I8, "int8", 1),
        (Dtype::F8_E4M3, "float8_e4m3fn", 1),
        (Dtype::F8_E5M2, "float8_e5m2", 1),
        (Dtype::F8_E8M0, "float8_e8m0fnu", 1),
        (Dtype::I16, "int16", 2),
        (Dtype::U16, "uint16", 2),
        (Dtype::F16, "float16", 2),
        (Dtype::BF16, "bfloat16", 2),
        (Dtype::I32, "int32", 4),
        (Dtype::U32, "uint32", 4),
        (Dtype::F32, "float32", 4),
        (Dtype::F64, "float64", 8),
        (Dtype::I64, "int64", 8),
        (Dtype::U64, "uint64", 8),
        (Dtype::C64, "complex64", 8),
    ];
    let bytes: Vec<u8> = (0..3 * 8).collect();
    let mut views: HashMap<String, TensorView<'_>> = types
        .iter()
        .map(|(dtype, name, size)| {
            (format!("t.{name}"), TensorView::new(*dtype, vec![3, 1], &bytes[..3 * size]).unwrap())
        })
        .collect();
    views.insert("t.empty".into(), TensorView::new(Dtype::F32, vec![0, 4], &[]).unwrap());
    views.insert("t.scalar".into(), TensorView::new(Dtype::F32, vec![], &bytes[..4]).unwrap());
    views.insert("t.float4_e2m1fn_x2".into(), TensorView::new(Dtype::F4, vec![3, 2], &bytes[..3]).unwrap());
    let directory = Directory::new();
    let file = directory.file("m.safetensors", &safetensors::serialize(views, None).unwrap());
    let name = unique("types");
    let _keeper = keep(&[&file, "--name", &name]);
    let ipc = ipc();
    let (_, mapping) = open(&ipc, &name).unwrap();
    let stream = ipc.create_stream(0).unwrap();
    for (_, name, size) in types.iter().chain([&(Dtype::F4, "float4_e2m1fn_x2", 1)]) {
        let tensor = mapping.get(&format!("t.{name}")).unwrap();
        assert_eq!((tensor.dtype().name(), tensor.shape()), (Some(*name), &[3, 1][..]));
        assert_eq!(tensor.to_host_bytes(&stream).unwrap(), bytes[..3 * size], "{name}");
    }
    assert_eq!(mapping.get("t.empty").unwrap().shape(), [0, 4]);
    assert_eq!(mapping.get("t.scalar").unwrap().to_host_bytes(&stream).unwrap(), bytes[..4]);
}

/// A file with this header and data.
fn raw(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

/// A file may place tensors at any byte.
#[test]
fn tensors_are_aligned_on_the_device() {
    let header = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}}"#;
    let directory = Directory::new();
    let file = directory.file("m.safetensors", &raw(header, &[7, 0, 0, 0x80, 0x3f]));
    let name = unique("aligned");
    let _keeper = keep(&[&file, "--name", &name]);
    let ipc = ipc();
    let (_, mapping) = open(&ipc, &name).unwrap();
    assert_eq!(values(&ipc, &mapping, "b"), [1.0]);
    for (tensor, place) in mapping.tensors() {
        assert!(place.range().ptr.get().is_multiple_of(256), "{tensor} begins at {}", place.range().ptr);
    }
}

#[test]
fn invalid_file_is_named_with_the_reason() {
    let whole = safetensors(&[("w", &[1.0; 8])]);
    let one = |dtype: &str, shape: &str, offsets: &str| {
        raw(&format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#), &[0; 8])
    };
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty", Vec::new(), "0 B"),
        ("prefix", whole[..7].to_vec(), "7 B"),
        ("header", whole[..20].to_vec(), "truncated"),
        ("data", whole[..whole.len() - 1].to_vec(), "truncated"),
        ("longer", [&whole[..], b"x"].concat(), "download it again"),
        ("huge-header", [&u64::MAX.to_le_bytes()[..], b"x"].concat(), "states a header"),
        ("json", raw("{\"w\":", &[]), "not a valid safetensors file"),
        ("type", one("F7", "[2]", "[0,8]"), "F7"),
        ("shape", one("F32", "[3]", "[0,8]"), "not a valid safetensors file"),
        ("offsets", one("F32", "[2]", "[4,12]"), "not a valid safetensors file"),
        ("backwards", one("F32", "[2]", "[8,0]"), "not a valid safetensors file"),
        ("overflow", one("F32", "[4294967296,4294967296,4]", "[0,8]"), "not a valid safetensors file"),
        (
            "unsupported",
            raw(r#"{"w":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}"#, &[0; 3]),
            "F6_E2M3",
        ),
        ("no-tensor", raw("{}", &[]), "contain no tensor"),
        ("text", b"version https://git-lfs.github.com/spec/v1\noid sha256:4711".to_vec(), "another format"),
    ];
    let directory = Directory::new();
    for (case, bytes, reason) in cases {
        let file = directory.file(&format!("{case}.safetensors"), &bytes);
        let error = run(["keep", &file, "--name", &unique(case)]).bad();
        assert!(error.contains(reason), "{case}: {error}");
        assert!(error.contains(&file) || case == "no-tensor", "{case}: {error}");
    }
    let good = model(&directory, "a.safetensors", &[("w", &[1.0])]);
    let same = model(&directory, "b.safetensors", &[("w", &[1.0])]);
    let error = run(["keep", &good, &same, "--name", &unique("same")]).bad();
    assert!(error.contains("a.safetensors") && error.contains("b.safetensors"), "{error}");
    let error = run(["keep", "/nowhere/m.safetensors", "--name", &unique("missing")]).bad();
    assert!(error.contains("/nowhere/m.safetensors"), "{error}");
    let empty = directory.path("empty-directory");
    std::fs::create_dir(&empty).unwrap();
    let error = run(["keep", empty.to_str().unwrap(), "--name", &unique("none")]).bad();
    assert!(error.contains("no file *.safetensors"), "{error}");
}

#[test]
fn device_out_of_range_and_memory_that_is_too_small_are_reported() {
    let directory = Directory::new();
    let file = model(&directory, "m.safetensors", &[("w", &[1.0])]);
    let name = unique("device");
    for arguments in [["--device", "2"], ["--device-map", "w=7"]] {
        let error = run(["keep", &file, "--name", &name, arguments[0], arguments[1]]).bad();
        assert!(error.contains(arguments[0]) && error.contains("2 device(s)"), "{error}");
    }
    let mut command = crate::support::device_ipc();
    command.args(["keep", &file, "--name", &name]).env("DEVICE_IPC_MOCK", "devices=1;memory=1MiB");
    let error = crate::support::Terminal::start(command).wait().bad();
    assert!(error.contains("one block"), "{error}");
}

/// A pipe without a writer neither delays the start, nor a reload and what follows.
#[test]
fn pipe_is_refused_and_delays_no_reload() {
    let directory = Directory::new();
    let models = directory.path("models");
    std::fs::create_dir(&models).unwrap();
    let pipe = directory.text("models/pipe.safetensors");
    let make = |path: &str| {
        rustix::fs::mkfifoat(rustix::fs::CWD, path, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    };
    make(&pipe);
    let models = models.to_str().unwrap();
    let error = run(["keep", models, "--name", &unique("pipe")]).bad();
    assert!(error.contains("not a regular file"), "{error}");
    let map = format!("@{pipe}");
    let error = run(["keep", models, "--name", &unique("pipe"), "--device-map", &map]).usage();
    assert!(error.contains("not a regular file"), "{error}");
    std::fs::remove_file(&pipe).unwrap();
    model(&directory, "models/m.safetensors", &[("w", &[1.0])]);
    let name = unique("pipe");
    let mut keeper = keep(&[models, "--name", &name]);
    make(&pipe);
    keeper.signal(rustix::process::Signal::HUP);
    keeper.until("not a regular file");
    std::fs::remove_file(&pipe).unwrap();
    keeper.signal(rustix::process::Signal::HUP);
    keeper.until("keeps version 2");
}

/// The decoded header of such a file would need 1 GiB of host memory.
#[test]
fn header_above_the_maximum_is_refused() {
    let directory = Directory::new();
    let path = directory.file("huge.safetensors", &(64_u64 << 20).to_le_bytes());
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(65 << 20).unwrap();
    let error = run(["keep", &path, "--name", &unique("huge")]).bad();
    assert!(error.contains("the maximum is 16777216 B"), "{error}");
}
