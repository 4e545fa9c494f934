//! Bare handles: the example `cuda_raw_handle` between two processes of its own, and with PyTorch both ways, where there
//! are a GPU and PyTorch.

#[path = "../../examples/cuda_raw_handle.rs"]
mod example;

use std::io::{BufReader, stdin, stdout};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::roles::{argument, no_cuda, role as this_role, start};
use cudarc::driver::sys::CUdevice_attribute;
use cudarc::driver::{CudaContext, CudaSlice, DevicePtr as _};
use device_ipc::cuda::raw::{self, RawHandle};
use device_ipc::{DeviceOrdinal, DevicePtr, DeviceRange, Error, OwnedRegion, Region, cuda};
use device_ipc_test_process::Process;

const FROM_HANDLE: &str = include_str!("../../examples/torch/from_handle.py");
const TO_HANDLE: &str = include_str!("../../examples/torch/to_handle.py");

#[test]
fn raw_handle_opens_in_another_process() {
    let Some([handle, offset, len]) = lend_and(borrow) else { return };
    // The digits are read as they are written.
    let parsed = example::parse(&handle, &offset, &len).expect("the example reads what it writes");
    assert_eq!(example::hexadecimal(&parsed.bytes), handle);
}

#[test]
fn raw_handle_of_ours_opens_in_pytorch() {
    if !torch_is_here() {
        return;
    }
    lend_and(|[handle, offset, len]| {
        let mut python = python();
        let borrower =
            Process::start("from_handle.py", python.args(["-c", FROM_HANDLE, handle, offset, len]));
        borrower.line(|line| line.contains(&format!("borrowed: {:?}", numbers())).then_some(()));
        borrower.line(|line| (line == "done").then_some(()));
        borrower.finish();
    });
}

#[test]
fn raw_handle_of_pytorch_opens() {
    if skipped() || !torch_is_here() {
        return;
    }
    let mut lender = Process::start("to_handle.py", python().args(["-c", TO_HANDLE]));
    let words = lender.line(handle_in);
    borrow(words.each_ref().map(String::as_str));
    lender.send("");
    let changed: Vec<f32> = numbers().iter().map(|number| number + 1.0).collect();
    lender.line(|line| line.contains(&format!("after the borrower: {changed:?}")).then_some(()));
    lender.finish();
}

#[test]
fn raw_handle_in_its_own_process_gives_the_original_memory() {
    in_a_process("own");
}

#[test]
fn raw_handle_of_an_inner_region_keeps_its_offset() {
    in_a_process("offset");
}

#[test]
fn missing_and_invalid_raw_handles_are_rejected() {
    in_a_process("refused");
}

/// Has a role lend numbers, gives the three words to the borrower, and sees the numbers changed.
fn lend_and(borrower: impl FnOnce([&str; 3])) -> Option<[String; 3]> {
    if skipped() {
        return None;
    }
    let mut lender = start(module_path!(), "lend", &[]);
    let words = lender.line(handle_in);
    borrower(words.each_ref().map(String::as_str));
    lender.send("");
    lender.finish();
    Some(words)
}

fn borrow([handle, offset, len]: [&str; 3]) {
    start(module_path!(), "borrow", &[("HANDLE", handle), ("OFFSET", offset), ("LEN", len)]).finish();
}

fn in_a_process(role: &str) {
    if !skipped() {
        start(module_path!(), role, &[]).finish();
    }
}

/// The last three words of a line, where the first of them is a handle. The test harness may have begun the line.
fn handle_in(line: &str) -> Option<[String; 3]> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let words: [&str; 3] = words.last_chunk().copied()?;
    (words[0].len() == 128).then(|| words.map(str::to_owned))
}

fn numbers() -> Vec<f32> {
    (0..example::COUNT).map(|number| number as f32).collect()
}

fn skipped() -> bool {
    let reason = no_cuda();
    if let Some(reason) = &reason {
        eprintln!("skipped: {reason}");
    }
    reason.is_some()
}

fn python() -> Command {
    Command::new(std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into()))
}

fn torch_is_here() -> bool {
    const ASK: &str = "import torch; assert torch.cuda.is_available(), 'PyTorch sees no GPU'";
    let asked = python().args(["-c", ASK]).output();
    let reason = match &asked {
        Ok(output) if output.status.success() => return true,
        Ok(output) => String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_owned(),
        Err(error) => error.to_string(),
    };
    eprintln!("skipped: python3 has no PyTorch with CUDA ({reason})");
    false
}

#[test]
#[ignore = "a role of the tests above"]
fn role() {
    match this_role().as_str() {
        "lend" => {
            let changed = example::lend(stdout(), BufReader::new(stdin())).expect("the lender works");
            let expected: Vec<f32> = numbers().iter().map(|number| number + 1.0).collect();
            assert_eq!(changed, expected);
        }
        "borrow" => {
            let handle = example::parse(&argument("HANDLE"), &argument("OFFSET"), &argument("LEN"));
            let borrowed = example::borrow(&handle.expect("the lender's words")).expect("the borrower works");
            assert_eq!(borrowed, numbers());
        }
        "part" => part(),
        "own" => own(),
        "offset" => offset(),
        "refused" => refused(),
        other => panic!("no such role: {other}"),
    }
}

/// Says when it is dropped.
struct Owner {
    _slice: CudaSlice<u8>,
    gone: Arc<AtomicBool>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::SeqCst);
    }
}

fn range_of(slice: &CudaSlice<u8>) -> DeviceRange {
    let (address, _guard) = slice.device_ptr(slice.stream());
    DeviceRange::new(DeviceOrdinal::new(0), DevicePtr::new(address), slice.num_bytes() as u64)
}

fn own() {
    let stream = CudaContext::new(0).expect("a device").default_stream();
    let slice = cuda::clone_htod(&stream, &[7u8; 100]).expect("memory");
    let (range, gone) = (range_of(&slice), Arc::new(AtomicBool::new(false)));
    let owner = Owner { _slice: slice, gone: gone.clone() };
    // SAFETY: the owner keeps the slice, and gives it to nobody.
    let owner = unsafe { OwnedRegion::new(owner, Region::new(cuda::NAME, range)) };
    let export = raw::export(owner).expect("memory of cuMemAlloc has a handle");
    let handle = *export.handle();
    assert_eq!(export.range(), range);

    // SAFETY: the export lives, and this process submits no work with the mapping.
    let mapping = unsafe { raw::open(&handle, 0) }.expect("the memory itself");
    assert!(mapping.is_own());
    assert_eq!(mapping.range(), range);
    let bytes = stream.clone_dtoh(&mapping.view::<u8>(&stream).expect("a view")).expect("a copy");
    assert_eq!(bytes, [7; 100]);

    let mut longer = handle;
    longer.len = 101;
    // SAFETY: as above.
    let more = unsafe { raw::open(&longer, 0) }.expect_err("a byte too many");
    assert!(more.to_string().contains("101 bytes at offset"), "{more}");

    drop(export);
    assert!(!gone.load(Ordering::SeqCst), "freed under a mapping");
    drop(mapping);
    assert!(gone.load(Ordering::SeqCst), "the owner is kept by nobody");

    // SAFETY: nothing is opened.
    let ended = unsafe { raw::open(&handle, 0) }.expect_err("the export has ended");
    assert!(matches!(ended, Error::Vendor(_)), "{ended}");
}

/// What the bytes of the whole allocation are: other ones at each place.
fn pattern() -> Vec<u8> {
    (0..4096u32).map(|place| (place / 16) as u8).collect()
}

fn offset() {
    let stream = CudaContext::new(0).expect("a device").default_stream();
    let slice = Arc::new(cuda::clone_htod(&stream, &pattern()).expect("memory"));
    let whole = range_of(&slice);
    let export = |offset, len| {
        let range = whole.slice(offset, len).expect("it lies inside");
        // SAFETY: the slice is kept.
        let owner = unsafe { OwnedRegion::new(slice.clone(), Region::new(cuda::NAME, range)) };
        raw::export(owner).expect("a handle")
    };
    let (first, second) = (export(256, 100), export(1024, 200));
    assert_eq!((second.handle().byte_offset - first.handle().byte_offset, first.handle().len), (768, 100));
    assert_eq!(first.handle().bytes, second.handle().bytes, "one allocation has one handle");
    // SAFETY: the exports live, and no work is submitted.
    let opened = unsafe { raw::open(second.handle(), 0) }.expect("the second region");
    assert_eq!(opened.range(), second.range());
    let handle = example::hexadecimal(&first.handle().bytes);
    let offset = first.handle().byte_offset.to_string();
    start(module_path!(), "part", &[("HANDLE", &handle), ("OFFSET", &offset), ("LEN", "100")]).finish();
}

/// Opens a part of another process's allocation, and leaves nothing open.
fn part() {
    let stream = CudaContext::new(0).expect("a device").default_stream();
    let handle = example::parse(&argument("HANDLE"), &argument("OFFSET"), &argument("LEN"));
    let handle = handle.expect("the exporter's words");
    let mut beyond = handle;
    beyond.len = 1 << 40;
    // SAFETY: the exporter waits for this process, and no work is submitted.
    let error = unsafe { raw::open(&beyond, 0) }.expect_err("more than the allocation has").to_string();
    assert!(error.contains("bytes at offset") && error.contains("exceed the allocation"), "{error}");

    // SAFETY: as above, and the copy is waited for.
    let mapping = unsafe { raw::open(&handle, 0) }.expect("it opens");
    let range = mapping.range();
    let bytes = stream.clone_dtoh(&mapping.view::<u8>(&stream).expect("a view")).expect("a copy");
    assert_eq!(bytes, pattern()[256..356]);
    assert!(mapping.view::<f64>(&stream).is_err(), "100 bytes are no whole numbers of 8");
    mapping.close().expect("it closes");

    // SAFETY: nothing keeps it, which is what is asked; nobody uses what comes of it.
    let gone = raw::export(unsafe { OwnedRegion::new((), Region::new(cuda::NAME, range)) });
    let error = gone.expect_err("nothing is mapped there any more, the refused attempt included");
    assert!(matches!(error, Error::NotDeviceMemory { .. }), "{error}");
}

fn refused() {
    const POOLS: CUdevice_attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
    let stream = CudaContext::new(0).expect("a device").default_stream();
    // Of cudarc's pool where the device has one; else of cuMemAlloc, which is fine.
    let pooled = stream.clone_htod(&[1u8; 64]).expect("memory");
    match raw::export(pooled) {
        Ok(_) => assert_eq!(stream.context().attribute(POOLS).expect("an attribute"), 0),
        Err(error) => assert!(error.to_string().contains("only memory of cuMemAlloc"), "{error}"),
    }
    let none = RawHandle::new([0; 64], 0, 64);
    // SAFETY: nothing can be opened by it.
    let error = unsafe { raw::open(&none, 0) }.expect_err("no handle");
    assert!(error.to_string().contains("cuIpcOpenMemHandle"), "{error}");
    let empty = RawHandle::new([0; 64], 0, 0);
    // SAFETY: as above.
    let error = unsafe { raw::open(&empty, 0) }.expect_err("no bytes");
    assert!(error.to_string().contains("0 bytes"), "{error}");
    // SAFETY: as above.
    let error = unsafe { raw::open(&none, 4711) }.expect_err("no device");
    assert!(matches!(error, Error::NoSuchDevice { .. }), "{error}");
    assert!(example::parse("12", "0", "1").is_err());
    assert!(example::parse(&"zz".repeat(64), "0", "1").is_err());
    assert!(example::parse(&"00".repeat(64), "-1", "1").is_err());
}
