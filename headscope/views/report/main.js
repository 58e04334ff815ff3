buildMap();
buildHead();
openHead(data.first, false);
