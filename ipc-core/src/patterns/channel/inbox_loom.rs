//! A model of an inbox and a socket in every interleaving of two ends: messages arrive in order, each exactly once, and no
//! receiver sleeps while a message is available.

use std::sync::atomic::Ordering;

use loom::sync::atomic::AtomicU64;
use loom::sync::{Arc, Condvar, Mutex};

use super::inbox::{Inbox, PutResult, SharedWord};
use super::room::Room;

impl SharedWord for AtomicU64 {
    fn load(&self, ordering: Ordering) -> u64 {
        self.load(ordering)
    }

    fn store(&self, value: u64, ordering: Ordering) {
        self.store(value, ordering);
    }

    fn fence() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// A packet of the socket.
enum Packet {
    Message(u64),
    Wake,
}

/// The state shared by the two ends. The inbox has room for one word.
struct Model {
    taken: AtomicU64,
    awake: AtomicU64,
    words: Vec<AtomicU64>,
    socket: Mutex<Vec<Packet>>,
    arrived: Condvar,
}

impl Model {
    fn new() -> Arc<Self> {
        let model = Self {
            taken: AtomicU64::new(0),
            awake: AtomicU64::new(1),
            words: (0..9).map(|_| AtomicU64::new(0)).collect(),
            socket: Mutex::new(Vec::new()),
            arrived: Condvar::new(),
        };
        Arc::new(model)
    }

    fn inbox(&self) -> Inbox<'_, AtomicU64> {
        Inbox { taken: &self.taken, awake: &self.awake, words: &self.words }
    }

    /// Sends as `ChannelConnection::send` does.
    fn send(&self, number: u64, last: &mut u64) {
        let put = self.inbox().put(*last, number, &[number as u8]);
        if put != PutResult::Refused {
            *last = number;
        }
        let packet = match put {
            PutResult::Refused => Packet::Message(number),
            PutResult::Unnoticed => Packet::Wake,
            PutResult::Done => return,
        };
        self.socket.lock().unwrap().push(packet);
        self.arrived.notify_one();
    }

    /// Receives as `ChannelConnection::receive` does: from the inbox, or from a packet after which it polls the inbox once more.
    fn receive(&self, next: u64, early: &mut Option<Packet>) {
        loop {
            let inbox = self.inbox();
            if inbox.has(next) {
                assert_eq!(inbox.take(next), Some(vec![next as u8]));
                return;
            }
            let packet =
                early.take().or_else(|| if inbox.fall_asleep(next) { Some(self.sleep()) } else { None });
            let Some(packet) = packet else { continue };
            inbox.wake_up();
            if inbox.has(next) {
                *early = Some(packet);
                continue;
            }
            match packet {
                Packet::Message(number) => return assert_eq!(number, next, "messages arrive in order"),
                Packet::Wake => {}
            }
        }
    }

    fn sleep(&self) -> Packet {
        let mut socket = self.socket.lock().unwrap();
        while socket.is_empty() {
            socket = self.arrived.wait(socket).unwrap();
        }
        socket.remove(0)
    }
}

#[test]
fn messages_arrive_in_order_and_wake_the_receiver() {
    loom::model(|| {
        let model = Model::new();
        let sender = loom::thread::spawn({
            let model = Arc::clone(&model);
            move || {
                let mut last = 0;
                (1..=3).for_each(|number| model.send(number, &mut last));
            }
        });
        let mut early = None;
        (1..=3).for_each(|number| model.receive(number, &mut early));
        sender.join().unwrap();
    });
}

/// A sender waits for the receipt of two messages, one after the other. It sleeps in the control socket only if a wake-up comes.
#[test]
fn sender_that_waits_for_room_is_woken() {
    struct WakeSocket {
        received: AtomicU64,
        wanted: AtomicU64,
        wakes: Mutex<u64>,
        arrived: Condvar,
    }
    loom::model(|| {
        let control = Arc::new(WakeSocket {
            received: AtomicU64::new(0),
            wanted: AtomicU64::new(0),
            wakes: Mutex::new(0),
            arrived: Condvar::new(),
        });
        let receiver = loom::thread::spawn({
            let control = Arc::clone(&control);
            move || {
                let room = Room { received: &control.received, wanted: &control.wanted };
                let mut woken_for = 0;
                for count in 1..=2 {
                    // As `ChannelConnection::acknowledge` does.
                    if let Some(wanted) = room.acknowledge(count)
                        && wanted != woken_for
                    {
                        woken_for = wanted;
                        *control.wakes.lock().unwrap() += 1;
                        control.arrived.notify_one();
                    }
                }
            }
        });
        let room = Room { received: &control.received, wanted: &control.wanted };
        for needed in 1..=2 {
            // As `ChannelConnection::has_room` and `wait_for_room` do.
            while room.received() < needed {
                *control.wakes.lock().unwrap() = 0;
                room.ask(needed);
                if room.received() >= needed {
                    break;
                }
                let mut wakes = control.wakes.lock().unwrap();
                while *wakes == 0 {
                    wakes = control.arrived.wait(wakes).unwrap();
                }
            }
        }
        receiver.join().unwrap();
    });
}
