//! A server of 8 client processes, which send tensors and receive their sums: once on a tokio runtime of one thread, once with
//! threads. Runs on the mock if there is no accelerator:
//!
//! ```text
//! cargo run --example channel_server                   # both servers
//! cargo run --example channel_server -- tokio 10000    # one of them, with 10,000 messages from each client
//! ```

mod roles;

use std::io::{BufRead, stdin};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use device_ipc::{
    ChannelReceiver, ChannelSender, Dtype, Error, ErrorKind, Ipc, Listener, Message, Received, Stream,
    TrySendError,
};
use roles::{Role, TIMEOUT};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

const CLIENTS: usize = 8;
const DEFAULT_MESSAGES: usize = 50;
const ELEMENTS: usize = 16;
/// The number of requests of a client that are not answered yet.
const REQUESTS: usize = 4;

/// The state that all connections of a server share.
struct Server {
    ipc: Ipc,
    stream: Stream,
}

impl Server {
    fn new() -> Result<Arc<Self>> {
        let ipc = Ipc::builder().allow_simulated(true).auto()?;
        let stream = ipc.create_stream(0)?;
        Ok(Arc::new(Self { ipc, stream }))
    }

    /// Opens the tensor of a request and returns the answer. It makes driver calls, and waits for the client's process.
    fn answer(&self, request: &Received) -> Result<Message<'static>> {
        let [tensor] = request.exports() else {
            bail!("a request has {} tensors instead of 1", request.exports().len());
        };
        let mapping = tensor.open().on(&self.stream)?;
        let sum: f32 = mapping.view::<f32, _>(&self.stream)?.to_vec()?.iter().sum();
        request.check()?; // the client did not terminate before it wrote the tensor
        Ok(Message::new().bytes(sum.to_le_bytes().to_vec()))
    }
}

// The server with tokio.

fn serve_with_tokio(server: &Arc<Server>, listener: Listener) -> Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let listener = watch(listener)?;
        let mut clients = Vec::new();
        for _ in 0..CLIENTS {
            let (sender, receiver) = accept(&listener).await?.split();
            clients.push(tokio::spawn(serve_client(Arc::clone(server), sender, receiver)));
        }
        for client in clients {
            client.await??;
        }
        Ok(())
    })
}

async fn serve_client(server: Arc<Server>, sender: ChannelSender, receiver: ChannelReceiver) -> Result<()> {
    let sender = watch(sender)?;
    let receiver = watch(receiver)?;
    loop {
        let request = match receive(&receiver).await {
            Ok(request) => request,
            Err(error) if error.kind() == ErrorKind::Closed => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        // An open waits for another process, which would stop the runtime's only thread.
        let server = Arc::clone(&server);
        let answer = tokio::task::spawn_blocking(move || server.answer(&request)).await??;
        send(&sender, answer).await?;
    }
}

async fn accept(listener: &AsyncFd<Listener>) -> Result<device_ipc::Channel, Error> {
    loop {
        if let Some(channel) = listener.get_ref().try_accept()? {
            return Ok(channel);
        }
        listener.readable().await.map_err(io)?.clear_ready();
    }
}

async fn receive(receiver: &AsyncFd<ChannelReceiver>) -> Result<Received, Error> {
    loop {
        if let Some(received) = receiver.get_ref().try_receive()? {
            return Ok(received);
        }
        receiver.readable().await.map_err(io)?.clear_ready();
    }
}

async fn send(sender: &AsyncFd<ChannelSender>, mut message: Message<'static>) -> Result<(), Error> {
    loop {
        match sender.get_ref().try_send(message) {
            Err(TrySendError::Full(returned)) => message = returned,
            sent => return Ok(sent?),
        }
        sender.readable().await.map_err(io)?.clear_ready();
    }
}

/// Registers a descriptor with the runtime. Listeners, channels and exports keep their descriptor until they are dropped.
#[allow(deprecated, reason = "tokio 1.54 recommends an unsafe function; this one exists in every tokio 1")]
fn watch<T: AsRawFd>(inner: T) -> std::io::Result<AsyncFd<T>> {
    AsyncFd::with_interest(inner, Interest::READABLE)
}

fn io(error: std::io::Error) -> Error {
    Error::io("waiting for a channel", error)
}

// The same server with threads.

fn serve_with_threads(server: &Arc<Server>, listener: &Listener) -> Result<()> {
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        let (channel, server) = (listener.accept(TIMEOUT)?, Arc::clone(server));
        clients.push(std::thread::spawn(move || -> Result<()> {
            loop {
                match channel.receive(TIMEOUT) {
                    Ok(request) => channel.send(server.answer(&request)?, TIMEOUT)?,
                    Err(error) if error.kind() == ErrorKind::Closed => return Ok(()),
                    Err(error) => return Err(error.into()),
                }
            }
        }));
    }
    for client in clients {
        client.join().expect("no client thread panics")?;
    }
    Ok(())
}

// The clients.

fn client() -> Result<()> {
    let mut line = String::new();
    stdin().lock().read_line(&mut line)?;
    let (name, messages) = line.trim().split_once(' ').context("no name and number of messages")?;
    let messages: usize = messages.parse()?;
    let ipc = Ipc::builder().allow_simulated(true).auto()?;
    let stream = ipc.create_stream(0)?;
    let channel = ipc.connect(name).timeout(TIMEOUT).start()?;
    for number in 0..messages + REQUESTS {
        if number < messages {
            let tensor = ipc.allocate(0, (ELEMENTS * size_of::<f32>()) as u64)?;
            tensor.view_mut::<f32, _>(&stream)?.copy_from(&values(number))?;
            let export = ipc.share(tensor).dtype(Dtype::F32).shape([ELEMENTS as u64]).start()?;
            channel.send(Message::new().export(export).ready_on(&stream), TIMEOUT)?;
        }
        if let Some(answered) = number.checked_sub(REQUESTS) {
            let answer = channel.receive(TIMEOUT)?;
            let sum = f32::from_le_bytes(answer.bytes().try_into().context("an answer has 4 B")?);
            ensure!(sum == values(answered).iter().sum::<f32>(), "the sum of tensor {answered} is {sum}");
        }
    }
    Ok(channel.close(TIMEOUT)?)
}

fn values(number: usize) -> Vec<f32> {
    (0..ELEMENTS).map(|index| ((number + index) % 1000) as f32).collect()
}

fn run(kind: &str, messages: usize) -> Result<()> {
    let server = Server::new()?;
    let name = format!("channel-server-{}-{kind}", std::process::id());
    let listener = server.ipc.listen(&name).start()?;
    let mut clients = (0..CLIENTS).map(|_| Role::start("client")).collect::<Result<Vec<_>>>()?;
    for client in &mut clients {
        client.send_line(&format!("{name} {messages}"))?;
    }
    match kind {
        "tokio" => serve_with_tokio(&server, listener)?,
        _ => serve_with_threads(&server, &listener)?,
    }
    clients.into_iter().try_for_each(Role::finish)?;
    println!("[{kind}] served {CLIENTS} clients with {messages} messages each");
    Ok(())
}

fn main() -> Result<()> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let messages = arguments.get(1).map_or(Ok(DEFAULT_MESSAGES), |count| count.parse())?;
    match arguments.first().map(String::as_str) {
        None => ["tokio", "threads"].into_iter().try_for_each(|kind| run(kind, messages)),
        Some(kind @ ("tokio" | "threads")) => run(kind, messages),
        Some("client") => client(),
        Some(other) => bail!("role {other:?} not found; the roles are tokio, threads and client"),
    }
}
