//! A raw CUDA handle of 64 bytes, to and from a program without device-ipc: PyTorch in this case. In two terminals, on a
//! machine with a GPU; the arguments of `borrow` and `from_handle.py` are the output of the other program:
//!
//! ```text
//! cargo run --example cuda_raw_handle -- lend
//! python3 examples/torch/from_handle.py HANDLE OFFSET BYTES
//! ```
//!
//! ```text
//! python3 examples/torch/to_handle.py
//! cargo run --example cuda_raw_handle -- borrow HANDLE OFFSET BYTES
//! ```
//!
//! The borrower adds 1 to each number, and the lender, which waits for the Enter key, prints the result. Two programs that
//! both use device-ipc exchange a descriptor instead: see `device_ipc::cuda::raw` for the limits of a raw handle.

use std::io::{BufRead, Write};

use anyhow::{Context as _, Result, bail, ensure};
use cudarc::driver::CudaContext;
use device_ipc::cuda::{self, raw, raw::RawHandle};

/// Number of shared elements: 0, 1, 2, and so on.
pub(crate) const COUNT: usize = 20;

/// Prints the handle, waits for a line, and returns the numbers at that time.
pub(crate) fn lend(mut output: impl Write, mut input: impl BufRead) -> Result<Vec<f32>> {
    let stream = CudaContext::new(0)?.default_stream();
    let numbers: Vec<f32> = (0..COUNT).map(|number| number as f32).collect();
    let numbers = std::sync::Arc::new(cuda::clone_htod(&stream, &numbers)?); // returns after the copy is complete
    let export = raw::export(numbers.clone())?;
    let RawHandle { bytes, byte_offset, len, .. } = export.handle();
    writeln!(output, "{} {byte_offset} {len}", hexadecimal(bytes))?;
    output.flush()?;
    let read = input.read_line(&mut String::new())?;
    ensure!(read > 0, "the standard input was closed before the borrower finished");
    drop(export); // the borrower has closed the memory, so it may be freed
    Ok(stream.clone_dtoh(&*numbers)?)
}

/// Adds 1 to each number of another program, and returns the previous numbers.
pub(crate) fn borrow(handle: &RawHandle) -> Result<Vec<f32>> {
    let stream = CudaContext::new(0)?.default_stream();
    // SAFETY: the lender keeps the memory until the user confirms completion, and the stream is synchronized below.
    let mut mapping = unsafe { raw::open(handle, 0)? };
    let numbers = stream.clone_dtoh(&mapping.view::<f32>(&stream)?)?;
    let more: Vec<f32> = numbers.iter().map(|number| number + 1.0).collect();
    let copied = stream.memcpy_htod(&more, &mut mapping.view_mut::<f32>(&stream)?);
    stream.synchronize()?; // also after a failed copy: the mapping must not be closed before
    copied?;
    mapping.close()?;
    Ok(numbers)
}

/// Parses the output of the other program.
pub(crate) fn parse(handle: &str, offset: &str, len: &str) -> Result<RawHandle> {
    let digits = handle.as_bytes();
    ensure!(
        digits.len() == 128 && digits.iter().all(u8::is_ascii_hexdigit),
        "invalid handle: expected 128 hexadecimal digits, found {} characters",
        digits.len()
    );
    let mut bytes = [0; 64];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair)?, 16)?;
    }
    let offset =
        offset.parse().with_context(|| format!("invalid offset {offset:?}: expected a number of bytes"))?;
    let len = len.parse().with_context(|| format!("invalid length {len:?}: expected a number of bytes"))?;
    Ok(RawHandle::new(bytes, offset, len))
}

pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[allow(dead_code, reason = "a test runs the two roles without it")]
fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["lend"] => {
            eprintln!("press Enter when the borrower has finished");
            println!("after the borrower: {:?}", lend(std::io::stdout(), std::io::stdin().lock())?);
        }
        ["borrow", handle, offset, len] => println!("borrowed: {:?}", borrow(&parse(handle, offset, len)?)?),
        _ => bail!("usage: cuda_raw_handle lend | borrow HANDLE OFFSET BYTES"),
    }
    Ok(())
}
