//! The other process of a program: opens what it is sent, or exports.

use std::collections::HashMap;
use std::time::Duration;

use device_ipc::backend::HandleKind;
use device_ipc::{Access, Descriptor, Error, Export, Ipc, Mapping, Stream};
use device_ipc_test_process::{Process, answer, request};

/// A process that obeys commands of one line and answers each with one line.
pub(crate) struct Peer(Process);

impl Peer {
    /// Starts a process; `hidden` is a variable that hides devices from it.
    pub(crate) fn start(hidden: Option<(&str, &str)>) -> Self {
        Self(Process::of_test(concat!(module_path!(), "::role"), hidden.as_slice()))
    }

    /// Sends a command and returns the answer.
    pub(crate) fn ask(&mut self, command: &[&str]) -> String {
        self.send(command);
        self.answer()
    }

    /// Sends a command, whose answer the caller takes later.
    pub(crate) fn send(&mut self, command: &[&str]) {
        self.0.send(&command.join("\t"));
    }

    /// Returns the next answer.
    pub(crate) fn answer(&mut self) -> String {
        self.0.receive()
    }

    pub(crate) fn kill(&mut self) {
        self.0.kill();
    }
}

/// Returns `ok`, or the variant of the error.
pub(crate) fn outcome<T>(result: Result<T, impl Into<Error>>) -> String {
    match result.map_err(Into::into) {
        Ok(_) => "ok".to_owned(),
        Err(error) => variant(&error),
    }
}

/// Returns the variant of an error.
pub(crate) fn variant(error: &Error) -> String {
    let debug = format!("{error:?}");
    debug.split([' ', '(', '{']).next().unwrap_or_default().to_owned()
}

#[derive(Default)]
struct State {
    mappings: HashMap<String, Mapping>,
    exports: Vec<Export>,
}

#[test]
#[ignore = "a role of the tests"]
fn role() {
    let ipc = Ipc::builder().allow_simulated(true).auto().expect("the backend that the variables select");
    let devices = ipc.devices().expect("devices").len() as u32;
    let streams: Vec<Stream> =
        (0..devices).map(|device| ipc.create_stream(device).expect("a stream")).collect();
    let mut state = State::default();
    while let Some(line) = request() {
        let fields: Vec<&str> = line.split('\t').collect();
        answer(obey(&ipc, &streams, &mut state, &fields).unwrap_or_else(|error| variant(&error)));
    }
}

fn obey(ipc: &Ipc, streams: &[Stream], state: &mut State, fields: &[&str]) -> Result<String, Error> {
    match fields {
        ["open", name, place, access, copy, descriptor] => {
            let descriptor: Descriptor = descriptor.parse()?;
            let builder = ipc.open(&descriptor).timeout(Duration::from_secs(20));
            let builder = match *access {
                "ro" => builder.access(Access::ReadOnly),
                "rw" => builder.access(Access::ReadWrite),
                _ => builder,
            };
            let builder = builder.copy(copy.parse()?);
            let mapping = match *place {
                "home" => builder.at_home(),
                "device 0" => builder.on_device(0),
                "device 1" => builder.on_device(1),
                "stream 0" => builder.on(&streams[0]),
                other => panic!("no place {other}"),
            }?;
            let device = mapping.device();
            let kind = if mapping.is_copy() { "copy" } else { "mapping" };
            let bytes = mapping.len();
            state.mappings.insert((*name).to_owned(), mapping);
            Ok(format!("ok: {kind} of {bytes} B on device {device}"))
        }
        [action @ ("read" | "write" | "timeline" | "release" | "drop" | "tensors"), name] => {
            let Some(mapping) = state.mappings.get(*name) else { return Ok("no mapping".into()) };
            let stream = &streams[mapping.device().index()];
            match *action {
                "read" => Ok(format!("ok: {:?}", first_and_last(&mapping.to_host_bytes(stream)?))),
                "write" => {
                    mapping.view_bytes_mut(stream)?.fill_bytes(9)?;
                    stream.synchronize()?;
                    Ok("ok".into())
                }
                "timeline" => Ok(outcome(mapping.timeline())),
                "tensors" => {
                    let mut found = Vec::new();
                    for (name, tensor) in mapping.tensors() {
                        found.push(format!("{name} {:?}", first_and_last(&tensor.to_host_bytes(stream)?)));
                    }
                    Ok(found.join(", "))
                }
                "release" => {
                    let mapping = state.mappings.remove(*name).expect("found above");
                    Ok(outcome(mapping.release(stream).map_err(Error::from)))
                }
                _ => {
                    state.mappings.remove(*name);
                    Ok("ok".into())
                }
            }
        }
        ["export", kind] => {
            let kind = HandleKind(kind.parse().expect("a number"));
            let memory = ipc.allocate_for(0, 4096, kind)?;
            memory.view_mut::<u8, _>(&streams[0])?.fill_bytes(7)?;
            let export = ipc.share(memory).ready_on(&streams[0]).start().map_err(Error::from)?;
            let text = export.descriptor().to_string();
            state.exports.push(export);
            Ok(text)
        }
        ["ring", descriptor] => {
            let descriptor: Descriptor = descriptor.parse()?;
            let mut reader = ipc.open_ring(&descriptor).at_home()?;
            answer("ok");
            let slot = reader.next(Duration::from_secs(20))?.expect("the writer has not closed the ring");
            let bytes = slot.to_host::<u8, _>(&streams[0])?;
            let answer = format!("ok: {:?}", first_and_last(&bytes));
            slot.release(&streams[0]).map_err(Error::from)?;
            streams[0].synchronize()?;
            Ok(answer)
        }
        ["receive", name] => {
            let channel = ipc.connect(name).start()?;
            let received = channel.receive(Duration::from_secs(20))?;
            let mapping = received.exports()[0].open().on(&streams[0])?;
            Ok(format!("ok: {:?}", first_and_last(&mapping.to_host_bytes(&streams[0])?)))
        }
        ["close-unused"] => Ok(outcome(device_ipc::close_unused(Duration::from_secs(20)))),
        other => panic!("no command {other:?}"),
    }
}

fn first_and_last(bytes: &[u8]) -> (Option<u8>, Option<u8>, usize) {
    (bytes.first().copied(), bytes.last().copied(), bytes.len())
}
