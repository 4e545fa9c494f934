use super::*;

#[test]
fn words_written_here_are_read_through_the_file_and_do_not_overlap() {
    let (page, file) = WordPage::create().unwrap();
    let far = WordPage::open(file).unwrap();
    let words = [Word::Ready, Word::FromExporter, Word::FromImporter, Word::Start, Word::Total];
    for slot in [0, 7, SLOTS - 1] {
        for word in words {
            page.word(slot, word).store(u64::from(slot) * 10 + word as u64, Ordering::Release);
        }
    }
    for slot in [0, 7, SLOTS - 1] {
        for word in words {
            assert_eq!(far.word(slot, word).load(Ordering::Acquire), u64::from(slot) * 10 + word as u64);
        }
    }
}

#[test]
fn shrinkable_file_is_rejected_as_a_page() {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    let unsealed = memfd_create("unsealed", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&unsealed, BYTES as u64).unwrap();
    assert!(matches!(WordPage::open(unsealed), Err(Error::Protocol(_))));
}
