use super::*;

#[test]
fn seeds_are_conversations_as_specified() {
    let importer = Importer::new();
    for (name, seed) in super::super::reply_seeds() {
        eprintln!("{name}");
        importer.open(&seed);
    }
}
