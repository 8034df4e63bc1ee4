"""The data in pages of reports, which is compressed."""

import base64
import gzip
import json
import re


def content(text):
    """What the page draws, as it was before it was compressed."""
    (found,) = re.findall(r'<script id="data" type="text/plain">([^<&]*)</script>', text)
    packed = found.translate(str.maketrans(",.", "<&"))
    return json.loads(gzip.decompress(base64.b85decode(packed)))
