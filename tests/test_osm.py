"""Readers of OpenStreetMap data: three formats, incomplete extracts, and files that are something else."""

import gzip
import json
import subprocess
import sys

import pytest
from osm_files import relation, town, write_json, write_xml
from real_data import real_data

from mdps.maps import DataError, Projection, osm_elements, read_osm

REAL = ["berlin_neukolln.osm", "helsinki_centre_crop.osm", "seattle_roosevelt.osm", "bavaria_village_small.osm"]


def write_pbf(path, source):
    osmium = pytest.importorskip("osmium")
    with osmium.SimpleWriter(str(path)) as writer:
        for element in osmium.FileProcessor(str(source)):
            writer.add(element)
    return path


def test_three_formats_are_the_same(tmp_path):
    elements = town()
    xml = read_osm(write_xml(tmp_path / "town.osm", elements))
    assert xml == read_osm(write_json(tmp_path / "town.json", elements))
    assert len(xml.nodes) == len([e for e in elements if e["type"] == "node"]) and len(xml.ways) == 7
    assert xml.nodes[9] == (50.00045, 8.0007, {"natural": "tree"}) and xml.ways[20].nodes == (1, 2, 3, 4, 1)
    assert xml.relations[30].members[1] == ("way", 22, "") and xml.bounds is None
    assert xml.extent() == (49.9, 8.0002, 50.0008, 8.0013)
    assert xml == read_osm(str(write_pbf(tmp_path / "town.osm.pbf", tmp_path / "town.osm")))


@pytest.mark.parametrize("name", ["town.json", "town", "town.osm.pbf", "town.txt"])
def test_content_decides_not_the_name(tmp_path, name):
    assert len(read_osm(write_xml(tmp_path / name, town())).ways) == 7
    assert len(read_osm(write_json(tmp_path / name, town())).ways) == 7
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf\n" + (tmp_path / name).read_bytes())  # saved by an editor of Windows
    assert len(read_osm(tmp_path / name).ways) == 7


def test_what_extracts_lack_is_normal(tmp_path):
    elements = [
        *town(),
        {"type": "way", "id": 50, "nodes": [1, 999, 2, None], "tags": None},
        {"type": "way", "id": 51},
        {"type": "node", "id": 52},
        {"type": "node", "id": 53, "lat": None, "lon": None},
        relation(54, [{"type": "way", "ref": 998, "role": None}, None], {}),
        {"type": "relation", "id": 55, "members": None, "tags": {"note": None}},
        {"type": "count", "id": 0},
        None,
    ]
    bounds = {"minlat": 50, "minlon": 8, "maxlat": 50.1, "maxlon": 8.1}
    osm = read_osm(write_json(tmp_path / "x.json", elements, bounds=bounds))
    assert osm.bounds == (50.0, 8.0, 50.1, 8.1)
    assert osm.ways[50] == ((1, 999, 2), {}) and osm.ways[51] == ((), {})
    assert 52 not in osm.nodes and 53 not in osm.nodes
    assert osm.relations[54].members == (("way", 998, ""),) and osm.relations[55] == ((), {})


def test_xml_of_other_programs(tmp_path):
    head = """<note>Data (c) OpenStreetMap contributors</note><meta osm_base="2024-03-30T13:08:30Z"/>
        <bounds minlat='50' minlon='8' maxlat='50.1' maxlon='8.1' origin='CGImap'/>
        <node id='-7' action='modify' visible='true' lat='50.0' lon='8.0'/>
        <node id='-8' action='delete' visible='true' lat='50.0' lon='8.0'/>
        <node id='-9' visible='false' version='3'/>
        <node id="60" lat="50.0" lon="8.0" version="1"><tag k="name" v="&#252;&amp;&quot;"/></node>
        <changeset id="1"><tag k="comment" v="no"/></changeset>"""
    osm = read_osm(write_xml(tmp_path / "x.osm", town(), head))
    assert -7 in osm.nodes and -8 not in osm.nodes and -9 not in osm.nodes
    assert osm.nodes[60].tags == {"name": 'ü&"'} and osm.bounds == (50.0, 8.0, 50.1, 8.1)
    assert len(osm.ways) == 7


def test_a_later_version_that_is_deleted_takes_the_element_away(tmp_path):
    head = """<node id="60" lat="50" lon="8" version="1" visible="true"/><node id="60" version="2" visible="false"/>
        <way id="61" version="1" visible="true"><nd ref="1"/></way><way id="61" version="2" visible="false"/>
        <relation id="62" version="1" visible="true"/><relation id="62" version="2" visible="false"/>
        <node id="63" version="1" visible="false"/><node id="63" lat="50" lon="8" version="2" visible="true"/>"""
    source = write_xml(tmp_path / "x.osm", [], head)
    osmium = pytest.importorskip("osmium")
    with osmium.SimpleWriter(str(tmp_path / "x.osh.pbf")) as writer:
        for element in osmium.FileProcessor(osmium.io.File(str(source), "osh")):
            writer.add(element)
    for path in (source, tmp_path / "x.osh.pbf"):
        osm = read_osm(path)
        assert (list(osm.nodes), list(osm.ways), list(osm.relations)) == ([63], [], []), path


@pytest.mark.parametrize("name", ["town.osm", "town.bin", "town"])
def test_a_pbf_of_any_name(tmp_path, name):
    xml = read_osm(write_xml(tmp_path / "source.osm", town()))
    (tmp_path / name).write_bytes(write_pbf(tmp_path / "town.osm.pbf", tmp_path / "source.osm").read_bytes())
    assert read_osm(tmp_path / name) == xml


@pytest.mark.parametrize("encoding", ["big5", "utf-7", "undefined", "nonsense"])
def test_xml_in_an_encoding_that_is_not_known(tmp_path, encoding):
    (tmp_path / "x.osm").write_text(f'<?xml version="1.0" encoding="{encoding}"?><osm version="0.6"/>')
    with pytest.raises(DataError, match=r"x\.osm: broken or truncated XML: "):
        read_osm(tmp_path / "x.osm")


LAUGHS = """<?xml version="1.0"?><!DOCTYPE osm [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>
<osm version="0.6"><node id="1" lat="1" lon="1"><tag k="name" v="&b;"/></node></osm>"""
OUTSIDE = '<?xml version="1.0"?><!DOCTYPE osm SYSTEM "file:///etc/passwd"><osm version="0.6"/>'
XML = '<osm version="0.6">{}</osm>'


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "empty file"),
        (b" \n", "empty file"),
        (b"id,lat,lon\n1,2,3\n", "expected OpenStreetMap XML, JSON or PBF, got b'id,lat,lon.*osmium cat"),
        (b"\xff\xe0o5m2", "expected OpenStreetMap XML, JSON or PBF"),
        (gzip.compress(b"<osm/>"), "compressed with gzip: unpack it first"),
        (b"BZh91AY", "compressed with bzip2"),
        (b"<!DOCTYPE HTML><html><body>Bad request</body></html>", r"a web page \(HTML\), not OpenStreetMap data"),
        (b"\n<html>504 Gateway Timeout</html>", r"a web page \(HTML\)"),
        (LAUGHS, r"XML with a document type \(osm\), which OpenStreetMap's has not: refused"),
        (OUTSIDE, "document type"),
        ('<osm version="0.6"><node id="1" lat="1" lon="1"/>', "broken or truncated XML: no element found: line 1"),
        ('<osm version="0.6"><node id="1" lat="1" lon="1">', "broken or truncated XML"),
        ('<?xml version="1.0" encoding="klingon"?><osm/>', "broken or truncated XML: unknown encoding"),
        (
            b'<?xml version="1.0" encoding="UTF-8"?><osm><node id="1" lat="1" lon="1"><tag k="a" v="\xff"/></node></osm>',
            "invalid token",
        ),
        ('<gpx version="1.1"><trk/></gpx>', r"expected OpenStreetMap XML \(<osm>\), got <gpx>"),
        ('<osmChange version="0.6"/>', "got <osmChange>"),
        (XML.format(""), "holds no nodes, ways or relations"),
        (XML.format('<node lat="1" lon="1"/>'), r"node without a number \(id\): expected a whole number, got None"),
        (XML.format('<node id="one" lat="1" lon="1"/>'), "got 'one'"),
        (XML.format('<node id="5" lat="91" lon="1"/>'), "node 5: expected lat and lon in degrees, got '91' and '1'"),
        (XML.format('<node id="5" lat="nan" lon="1"/>'), "node 5: expected lat and lon in degrees, got 'nan'"),
        (XML.format('<way id="6"><nd ref="a"/></way>'), "way 6: a node's number: expected a whole number, got 'a'"),
        (XML.format('<bounds minlat="1"/>'), "bounds: expected lat and lon in degrees, got '1' and None"),
        (
            XML.format("<remark> runtime error: Query timed out after 25 seconds </remark>"),
            "incomplete, the server says: runtime",
        ),
        ("{", "broken or truncated JSON"),
        ('{"elements": [{"type": "node", ', "broken or truncated JSON"),
        ("[1, 2]", r'expected JSON of the OpenStreetMap API, {"elements": \[...\]}'),
        ("{}", "expected JSON of the OpenStreetMap API"),
        ('{"elements": null}', "expected JSON of the OpenStreetMap API"),
        ('{"type": "FeatureCollection", "features": []}', "GeoJSON is another format"),
        ('{"elements": []}', "holds no nodes, ways or relations"),
        ('{"elements": [null]}', "holds no nodes, ways or relations"),
        ('{"elements": [], "remark": "runtime error: out of memory"}', "incomplete, the server says: runtime error: out of"),
        (
            '{"elements": [{"type": "node", "id": 5, "lat": [1], "lon": 1}]}',
            "node 5: expected lat and lon in degrees, got l",
        ),
        (
            '{"elements": [{"type": "node", "id": 5, "lat": 1' + "0" * 400 + ', "lon": 1}]}',
            "node 5: expected lat and lon in degrees, got 1000",
        ),
        (
            '{"elements": [], "bounds": {"minlat": 1' + "0" * 400 + ', "minlon": 1, "maxlat": 1, "maxlon": 1}}',
            "bounds: expected lat and lon in degrees, got 1000",
        ),
        ('{"elements": [{"type": "node", "id": 5.5, "lat": 1, "lon": 1}]}', "expected a whole number, got 5.5"),
        ('{"elements": [{"type": "node", "id": true, "lat": 1, "lon": 1}]}', "expected a whole number, got True"),
        ('{"elements": [{"type": "node", "id": 5, "lat": NaN, "lon": 1}]}', "node 5: expected lat and lon in degrees, got nan"),
        ('{"elements": [{"type": "way", "id": 5, "nodes": "1,2"}]}', "way 5: nodes: expected a list, got '1,2'"),
        ('{"elements": [{"type": "way", "id": 5, "tags": [1]}]}', "way 5: expected tags as key: value, got list"),
        (
            '{"elements": [{"type": "relation", "id": 5, "members": [3]}]}',
            "relation 5: expected members .* got 3",
        ),
        ('{"elements": [{"type": "node", "id": 1' + "0" * 5000 + "}]}", "broken or truncated JSON"),
        ("[" * 200_000, "broken or truncated JSON"),
        (b"\x00\x00\x00\x0d\x0a\x09OSMHeader" + bytes(50), "broken or truncated PBF"),
    ],
)
def test_files_that_are_something_else_give_one_line(tmp_path, content, match):
    path = tmp_path / "map.osm"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    if "PBF" in match and "XML" not in match:
        pytest.importorskip("osmium")
    with pytest.raises(DataError, match=match) as caught:
        read_osm(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_no_such_file_and_folder(tmp_path):
    with pytest.raises(DataError, match="none.osm: No such file"):
        read_osm(tmp_path / "none.osm")
    with pytest.raises(DataError, match="Is a directory"):
        read_osm(tmp_path)


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
def test_truncated_pbf(tmp_path, keep):
    path = write_pbf(tmp_path / "town.osm.pbf", write_xml(tmp_path / "town.osm", town()))
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data))])
    with pytest.raises(DataError, match="broken or truncated PBF: ") as caught:
        read_osm(path)
    assert "\n" not in str(caught.value)


def test_pbf_without_pyosmium_says_what_helps(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "osmium", None)
    path = tmp_path / "town.osm.pbf"
    path.write_bytes(b"\x00\x00\x00\x0d\x0a\x09OSMHeader" + bytes(50))
    with pytest.raises(ImportError, match=r"town.osm.pbf needs pyosmium: pip install osmium \(or: osmium cat "):
        read_osm(path)


def test_import_needs_no_further_package():
    code = "import sys; sys.modules.update(cv2=None, osmium=None, rasterio=None); import mdps.maps; print(mdps.maps.AREAS[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "building\n"


@pytest.mark.parametrize("name", REAL)
def test_real_extracts(name, tmp_path):
    """Counts of the file's lines; JSON made from it, and what osmium makes of it, are the same."""
    path = real_data(f"osm/{name}")
    text = path.read_text()
    osm = read_osm(path)
    counts = [text.count(f"<{kind} id=") for kind in ("node", "way", "relation")]
    assert [len(osm.nodes), len(osm.ways), len(osm.relations)] == counts
    elements = [{"type": "node", "id": i, "lat": n.latitude, "lon": n.longitude, "tags": n.tags} for i, n in osm.nodes.items()]
    elements += [{"type": "way", "id": i, "nodes": w.nodes, "tags": w.tags} for i, w in osm.ways.items()]
    for i, r in osm.relations.items():
        elements.append({"type": "relation", "id": i, "tags": r.tags})
        elements[-1]["members"] = [{"type": m.kind, "ref": m.number, "role": m.role} for m in r.members]
    again = read_osm(write_json(tmp_path / "x.json", json.loads(json.dumps(elements))))
    assert (again.nodes, again.ways, again.relations) == (osm.nodes, osm.ways, osm.relations)
    again = read_osm(write_pbf(tmp_path / "x.osm.pbf", path))
    assert (again.nodes, again.ways, again.relations) == (osm.nodes, osm.ways, osm.relations)


def test_real_pbf():
    pytest.importorskip("osmium")
    osm = read_osm(real_data("osm/helsinki_centre.osm.pbf"))
    assert [len(osm.nodes), len(osm.ways), len(osm.relations)] == [24260, 5130, 620]
    assert osm.bounds == pytest.approx((60.164155, 24.9351762, 60.179113, 24.9534145))
    elements = osm_elements(osm, Projection(60.1705, 24.944))
    assert elements.missing["nodes of ways"] > 0 and all(len(line.points) > 1 for line in elements.lines)
