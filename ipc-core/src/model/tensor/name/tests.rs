use super::*;

#[test]
fn name_is_inserted_once_and_found_at_its_position() {
    let names: Vec<String> = (0..5000).map(|index| format!("layer.{index}")).collect();
    let name_at = |position: u32| names[position as usize].as_str();
    for mut index in [NameIndex::default(), NameIndex::with_room_for(names.len())] {
        assert_eq!(index.find("layer.0", name_at), None);
        for position in 0..5000 {
            assert!(index.insert(position, name_at));
        }
        for position in 0..5000 {
            assert_eq!(index.find(name_at(position), name_at), Some(position));
        }
        assert_eq!(index.find("layer.5000", name_at), None);
        let again = |position: u32| if position == 5000 { "layer.17" } else { name_at(position) };
        assert!(!index.insert(5000, again), "it is there");
        assert_eq!(index.find("layer.17", name_at), Some(17));
    }
}
